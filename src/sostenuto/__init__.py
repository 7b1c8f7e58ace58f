"""Sostenuto: a program-aware scheduling runtime for agents and their training.

    import sostenuto as so

The public API is loaded lazily: a tool server or a sandbox that imports one package never pays for,
or needs, what another one depends on.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sostenuto.envs.agent import agent as agent
    from sostenuto.envs.command_agent import command_agent as command_agent
    from sostenuto.envs.curriculum import Curriculum as Curriculum
    from sostenuto.envs.environment import Environment as Environment
    from sostenuto.envs.registry import Registry as Registry
    from sostenuto.envs.remote_agent import remote_agent as remote_agent
    from sostenuto.envs.task import Draw as Draw
    from sostenuto.envs.task import Tasks as Tasks
    from sostenuto.envs.testing import so_test as so_test
    from sostenuto.envs.workspace import SandboxSpec as SandboxSpec
    from sostenuto.errors import ConfigError as ConfigError
    from sostenuto.errors import SostenutoError as SostenutoError
    from sostenuto.errors import ToolError as ToolError
    from sostenuto.records import Span as Span
    from sostenuto.records import Trajectory as Trajectory
    from sostenuto.runtime.config import EngineSettings as EngineSettings
    from sostenuto.runtime.config import GatewaySettings as GatewaySettings
    from sostenuto.runtime.config import RuntimeConfig as RuntimeConfig
    from sostenuto.runtime.config import ToolServerSettings as ToolServerSettings
    from sostenuto.runtime.jobs.finished import Finished as Finished
    from sostenuto.runtime.jobs.group import Group as Group
    from sostenuto.runtime.jobs.job import EvalJob as EvalJob
    from sostenuto.runtime.jobs.job import RLJob as RLJob
    from sostenuto.runtime.jobs.job import RolloutJob as RolloutJob
    from sostenuto.runtime.jobs.job import WarmStart as WarmStart
    from sostenuto.runtime.jobs.mixed import MixedIn as MixedIn
    from sostenuto.runtime.jobs.phases import Phase as Phase
    from sostenuto.runtime.jobs.prefixes import Prefixes as Prefixes
    from sostenuto.runtime.jobs.reward_model import RewardModel as RewardModel
    from sostenuto.runtime.jobs.rewarding import GroupRewards as GroupRewards
    from sostenuto.runtime.jobs.rewarding import LateRewards as LateRewards
    from sostenuto.runtime.jobs.roles import Role as Role
    from sostenuto.runtime.jobs.serve import ServeJob as ServeJob
    from sostenuto.runtime.jobs.teacher import Teacher as Teacher
    from sostenuto.runtime.runtime import Runtime as Runtime
    from sostenuto.scheduler.settings import SchedulerSettings as SchedulerSettings
    from sostenuto.scheduler.update_terms import UpdateTerms as UpdateTerms
    from sostenuto.tools.decorator import tool as tool
    from sostenuto.tools.remote.declared import HttpTool as HttpTool
    from sostenuto.tools.remote.declared import McpServer as McpServer
    from sostenuto.trainer.algorithms import CISPO as CISPO
    from sostenuto.trainer.algorithms import GRPO as GRPO
    from sostenuto.trainer.algorithms import GSPO as GSPO
    from sostenuto.trainer.algorithms import OPD as OPD
    from sostenuto.trainer.algorithms import PPO as PPO
    from sostenuto.trainer.algorithms import RLOO as RLOO
    from sostenuto.trainer.algorithms import SAPO as SAPO
    from sostenuto.trainer.algorithms import DecoupledPPO as DecoupledPPO
    from sostenuto.trainer.algorithms import DrGRPO as DrGRPO
    from sostenuto.trainer.algorithms import Reinforce as Reinforce
    from sostenuto.trainer.algorithms import ReinforcePP as ReinforcePP
    from sostenuto.trainer.parts import GAE as GAE
    from sostenuto.trainer.parts import KL as KL
    from sostenuto.trainer.parts import TIS as TIS
    from sostenuto.trainer.parts import CriticHead as CriticHead
    from sostenuto.trainer.parts import CriticModel as CriticModel
    from sostenuto.trainer.parts import IcePop as IcePop
    from sostenuto.trainer.parts import Rejection as Rejection
    from sostenuto.trainer.parts import Teaching as Teaching
    from sostenuto.trainer.settings import LearnerSettings as LearnerSettings
    from sostenuto.trainer.settings import Schedule as Schedule
    from sostenuto.types import Episode as Episode
    from sostenuto.types import Limits as Limits
    from sostenuto.types import Message as Message
    from sostenuto.types import StopReason as StopReason
    from sostenuto.types import Version as Version

_HOME = {
    "RLOO": "trainer.algorithms",
    "DrGRPO": "trainer.algorithms",
    "Reinforce": "trainer.algorithms",
    "ReinforcePP": "trainer.algorithms",
    "GSPO": "trainer.algorithms",
    "CISPO": "trainer.algorithms",
    "SAPO": "trainer.algorithms",
    "DecoupledPPO": "trainer.algorithms",
    "KL": "trainer.parts",
    "PPO": "trainer.algorithms",
    "GAE": "trainer.parts",
    "CriticHead": "trainer.parts",
    "CriticModel": "trainer.parts",
    "IcePop": "trainer.parts",
    "Rejection": "trainer.parts",
    "ConfigError": "errors",
    "Curriculum": "envs.curriculum",
    "Draw": "envs.task",
    "Environment": "envs.environment",
    "Episode": "types",
    "EngineSettings": "runtime.config",
    "EvalJob": "runtime.jobs.job",
    "GatewaySettings": "runtime.config",
    "GRPO": "trainer.algorithms",
    "LearnerSettings": "trainer.settings",
    "HttpTool": "tools.remote.declared",
    "Limits": "types",
    "McpServer": "tools.remote.declared",
    "Message": "types",
    "RLJob": "runtime.jobs.job",
    "RewardModel": "runtime.jobs.reward_model",
    "Role": "runtime.jobs.roles",
    "Finished": "runtime.jobs.finished",
    "Group": "runtime.jobs.group",
    "GroupRewards": "runtime.jobs.rewarding",
    "LateRewards": "runtime.jobs.rewarding",
    "Registry": "envs.registry",
    "RolloutJob": "runtime.jobs.job",
    "Runtime": "runtime.runtime",
    "RuntimeConfig": "runtime.config",
    "SandboxSpec": "envs.workspace",
    "Schedule": "trainer.settings",
    "SchedulerSettings": "scheduler.settings",
    "ServeJob": "runtime.jobs.serve",
    "SostenutoError": "errors",
    "Span": "records",
    "StopReason": "types",
    "TIS": "trainer.parts",
    "MixedIn": "runtime.jobs.mixed",
    "OPD": "trainer.algorithms",
    "Phase": "runtime.jobs.phases",
    "Prefixes": "runtime.jobs.prefixes",
    "Teacher": "runtime.jobs.teacher",
    "Teaching": "trainer.parts",
    "Tasks": "envs.task",
    "ToolError": "errors",
    "ToolServerSettings": "runtime.config",
    "Trajectory": "records",
    "UpdateTerms": "scheduler.update_terms",
    "Version": "types",
    "WarmStart": "runtime.jobs.job",
    "agent": "envs.agent",
    "command_agent": "envs.command_agent",
    "remote_agent": "envs.remote_agent",
    "so_test": "envs.testing",
    "tool": "tools.decorator",
}

__all__ = [
    "CISPO",
    "GAE",
    "GRPO",
    "GSPO",
    "KL",
    "OPD",
    "PPO",
    "RLOO",
    "SAPO",
    "TIS",
    "ConfigError",
    "CriticHead",
    "CriticModel",
    "Curriculum",
    "DecoupledPPO",
    "DrGRPO",
    "Draw",
    "EngineSettings",
    "Environment",
    "Episode",
    "EvalJob",
    "Finished",
    "GatewaySettings",
    "Group",
    "GroupRewards",
    "HttpTool",
    "IcePop",
    "LateRewards",
    "LearnerSettings",
    "Limits",
    "McpServer",
    "Message",
    "MixedIn",
    "Phase",
    "Prefixes",
    "RLJob",
    "Registry",
    "Reinforce",
    "ReinforcePP",
    "Rejection",
    "RewardModel",
    "Role",
    "RolloutJob",
    "Runtime",
    "RuntimeConfig",
    "SandboxSpec",
    "Schedule",
    "SchedulerSettings",
    "ServeJob",
    "SostenutoError",
    "Span",
    "StopReason",
    "Tasks",
    "Teacher",
    "Teaching",
    "ToolError",
    "ToolServerSettings",
    "Trajectory",
    "UpdateTerms",
    "Version",
    "WarmStart",
    "agent",
    "command_agent",
    "remote_agent",
    "so_test",
    "tool",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sostenuto' has no attribute {name!r}")
    return getattr(import_module(f"sostenuto.{_HOME[name]}"), name)
