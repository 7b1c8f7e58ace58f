"""Engine profiles are data, and a bad one says what is wrong with it."""

from pathlib import Path

import pytest

from sostenuto.errors import ConfigError
from sostenuto.runtime.simulation.profiles import known_profiles, load_profile

GOOD = 'name = "mine"\nkv_tokens = 1000\nprefill_tokens_s = 100\nitl_s = [[1, 0.01], [4, 0.02]]\n'


def test_every_profile_that_is_shipped_loads():
    assert {name: load_profile(name).name for name in known_profiles()} == {n: n for n in known_profiles()}


def test_the_pod_is_what_was_measured():
    pod = load_profile("pod-h100x2-qwen3-30b")
    assert (pod.kv_tokens, pod.prefill_tokens_s) == (2_237_040, 22_000)
    assert [pod.itl(n) for n in (4, 12, 32)] == [0.010, 0.020, 0.040]


def test_a_profile_can_be_a_file(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load_profile(str(path)).itl(4) == 0.02


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean 'small'.*path of a TOML file"):
        load_profile("smal")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD.replace("= 100\n", "= 0\n"), "prefill_tokens_s"),
        (GOOD.replace("[4, 0.02]", "[1, 0.02]"), "itl_s"),
        (GOOD.replace("0.02", "0.0"), "itl_s"),
        (GOOD + "speed = 3\n", "speed"),
        (GOOD + "host_tokens = 3\n", "host_tokens_s"),
        (GOOD + "=\n", "not TOML.*line 5"),
    ],
)
def test_a_bad_profile_names_the_file_and_the_field(tmp_path: Path, text: str, says: str):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.toml: .*{says}"):
        load_profile(str(path))
