"""Pages that show a run, made from its events. Does not import torch. Start reading at `summary`, then `page`."""
