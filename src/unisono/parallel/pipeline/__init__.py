"""One model over the ranks of a pipeline, each with a stage of it, to the bits of one process."""

from unisono.parallel.pipeline.pipeline import Pipeline
from unisono.parallel.pipeline.stages import PipelineStages, cut

__all__ = ["Pipeline", "PipelineStages", "cut"]
