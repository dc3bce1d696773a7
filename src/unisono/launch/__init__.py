"""Processes of a job on one machine: the agent that owns it, the fork server, the ranks."""

from unisono.launch.agent import run_job
from unisono.launch.launch_job import LaunchJob, check_target

__all__ = ["LaunchJob", "check_target", "run_job"]
