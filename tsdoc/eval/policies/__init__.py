"""Policies: what a token attends to, each behind the same small interface."""

from tsdoc.eval.policies.interface import Contender, ModelContext, Reply
from tsdoc.eval.policies.registry import POLICIES, PolicyChoice, parse_policy

__all__ = ["POLICIES", "Contender", "ModelContext", "PolicyChoice", "Reply", "parse_policy"]
