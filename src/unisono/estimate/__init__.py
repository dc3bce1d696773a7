"""The costs of training a model, in each layout. Imported by `unisono plan` alone; needs torch."""

from unisono.estimate.plan_text import as_document, as_text
from unisono.estimate.planning import Plan, Request, make_plan
from unisono.estimate.user_build import UserCodeError

__all__ = ["Plan", "Request", "UserCodeError", "as_document", "as_text", "make_plan"]
