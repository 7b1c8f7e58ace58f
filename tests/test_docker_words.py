"""What a daemon says with status 500, and what it means.  No daemon is needed."""

import pytest

from sostenuto.errors import SandboxError
from sostenuto.sandbox.docker.typed import Conflict, Refused, _errors  # pyright: ignore[reportPrivateUsage]

errors = pytest.importorskip("docker.errors")


class _Response:
    status_code = 500


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Container 1 is not paused", Conflict),
        ("cannot remove container 1 as it could not be stopped: sending SIGKILL", Conflict),
        ("container state improper: stopped", Conflict),
        ("cannot overwrite directory with non-directory", Refused),
        ('copier: stat: error resolving "/x": open /x: too many levels of symbolic links', Refused),
        ('copier: put: error creating file at "/x": open /x: file exists', Refused),
        ("the disk is broken", SandboxError),
    ],
)
def test_what_a_daemon_says_has_its_kind(said: str, kind: type[SandboxError]):
    with pytest.raises(SandboxError, match="remove x: ") as caught, _errors("remove x"):
        raise errors.APIError("500", response=_Response(), explanation=said)
    assert type(caught.value) is kind
