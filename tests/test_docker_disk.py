"""What a container may write: bounded where the storage driver can, refused with its remedy where not."""

from dockers import backend_at, docker_root, needs_docker, said
from sostenuto.sandbox.protocol import Blueprint

pytestmark = needs_docker


async def test_a_bound_on_the_disk_is_kept_or_refused_by_name():
    with docker_root() as root:
        backend = backend_at(root, disk_bytes=32 << 20)
        probe = await backend.probe()
        if not probe.works:
            assert "storage" in probe.details["error"]
            assert probe.remedy.startswith("the daemon's storage on xfs")
            return
        assert "what it writes" in probe.details["limits"]
        sandbox = await backend.start("x", Blueprint())
        result = await said(
            sandbox, "head -c 60000000 /dev/zero >a; echo $?; head -c 10 a | wc -c; rm a; echo b >b"
        )
        assert result.output.splitlines()[-2:] == ["1", "10"]
        assert (await sandbox.usage()).disk_bytes < 32 << 20
        assert (await said(sandbox, "cat b")).output == "b\n"
        await sandbox.stop()
        await backend.close()
