"""What no backend, or not every one, could start."""

from pathlib import Path

from sostenuto.errors import ConfigError, SandboxError
from sostenuto.sandbox.egress.allowed import AllowList
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.sandbox.shell import SHELLS


def check_blueprint(name: str, blueprint: Blueprint) -> None:
    """Raise ConfigError or SandboxError for what no backend of this machine could start."""
    if blueprint.shell not in SHELLS:
        raise ConfigError(f"sandbox {name!r}: shell {blueprint.shell!r}; known: {', '.join(SHELLS)}")
    if blueprint.image is not None:
        raise ConfigError(f"sandbox {name!r}: image {blueprint.image!r}; only backend 'docker' has images")
    for variable, value in blueprint.environment.items():
        if not variable.isidentifier() or "\0" in value:
            raise ConfigError(f"sandbox {name!r}: {variable!r} cannot be an environment variable")
    if blueprint.template is not None and not Path(blueprint.template).is_dir():
        raise SandboxError(f"sandbox {name!r}: template {blueprint.template!r} is not a folder")
    AllowList(blueprint.network)


def check_no_network(name: str, blueprint: Blueprint) -> None:
    """Raise ConfigError when it asks for a network."""
    if blueprint.network:
        raise ConfigError(
            f"sandbox {name!r}: network {list(blueprint.network)}; only 'bubblewrap' and 'docker' can "
            "let a sandbox reach some servers and no others"
        )
