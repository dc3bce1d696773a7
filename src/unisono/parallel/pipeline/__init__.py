"""Cut a model at the calls of named submodules over stages, without tracing, to the gradients of one process."""
