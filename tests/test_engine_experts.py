"""Mixture-of-experts models: which experts ran, for each token, and the same ones again in the trainer."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine_models import Desk, load, make_core, make_folder, prompt, publish
from sostenuto.runtime.engines.embedded.tensors import as_list, use_attention
from sostenuto.runtime.engines.wire import CommitRequest, Feature, GenerateReply
from sostenuto.trainer.model import Policy, load_policy
from sostenuto.trainer.routing import UNKNOWN, Routers, find_routers

LAYERS, TOP_K, EXPERTS = 2, 2, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("moe"), "qwen3_moe", seed=3)


@pytest.fixture
def desk(folder: Path) -> Desk:
    return Desk(make_core(folder))


@pytest.fixture
def policy(folder: Path) -> Policy:
    return load_policy(folder, "float32")


def routed(reply: GenerateReply) -> NDArray[np.int16]:
    """(tokens, layers, experts a token)."""
    assert reply.routed_experts is not None
    data = base64.b64decode(reply.routed_experts.data)
    return np.frombuffer(data, dtype="<i2").reshape(reply.routed_experts.shape)


def chosen(module: nn.Module, token_ids: list[int]) -> NDArray[np.int16]:
    """What plain transformers routes each token to, from the logits of its routers."""
    use_attention(cast("Any", module), "eager")
    with torch.no_grad():
        output = cast("Any", module)(input_ids=torch.tensor([token_ids]), output_router_logits=True)
    best = [logits.softmax(-1).topk(TOP_K, dim=-1).indices for logits in output.router_logits]
    return torch.stack(best, dim=1).to(torch.int16).numpy()


@torch.no_grad()
def no_gradient(
    policy: Policy, token_ids: list[int], start: int, experts: NDArray[np.int16] | None
) -> Tensor:
    return logprobs(policy, token_ids, start, experts)


def logprobs(policy: Policy, token_ids: list[int], start: int, experts: NDArray[np.int16] | None) -> Tensor:
    """Of token_ids[start:], as the trainer computes them."""
    positions = torch.arange(start - 1, len(token_ids) - 1)
    given = None if experts is None else torch.tensor(experts[: len(token_ids) - 1])
    ids = torch.tensor(token_ids)
    features = policy.features(ids[:-1], (len(ids) - 1,), positions, experts=given)
    return policy.logits(features).log_softmax(-1).gather(1, ids[start:, None])[:, 0]


def test_the_experts_of_every_computed_token_come_back(desk: Desk, folder: Path):
    assert Feature.ROUTED_EXPERTS in desk.core.capabilities().features
    contexts = [prompt(length, seed=length) for length in (3, 40, 300)]
    for i, context in enumerate(contexts):
        desk.submit(str(i), context, max_new_tokens=6, routed_experts=True, sampling={"seed": i})
    desk.run()
    plain = load(folder).module
    for i, context in enumerate(contexts):
        reply = desk.reply(str(i))
        found = routed(reply)
        assert found.shape == (len(context) + 5, LAYERS, TOP_K)
        np.testing.assert_array_equal(found, chosen(plain, context + reply.token_ids)[:-1])


def test_a_reply_has_no_experts_unless_they_were_asked_for(desk: Desk):
    assert desk.turn("a", prompt(9)).routed_experts is None


def test_the_next_turn_has_the_experts_of_cached_tokens_from_the_position_asked_for(desk: Desk, folder: Path):
    context = prompt(30)
    first = desk.turn("r0", context, program_id="p", routed_experts=True)
    longer = [*context, *first.token_ids, *prompt(8, seed=5)]
    second = desk.turn("r1", longer, program_id="p", routed_experts=True)
    assert second.cached_tokens == len(context) + 7
    expected = chosen(load(folder).module, longer + second.token_ids)[:-1]
    np.testing.assert_array_equal(routed(second), expected)
    longest = [*longer, *second.token_ids, 4]
    third = desk.turn("r2", longest, program_id="p", routed_experts=True, routed_experts_from=len(longer))
    assert third.routed_experts is not None
    assert third.routed_experts.start == len(longer)
    expected = chosen(load(folder).module, longest + third.token_ids)[len(longer) : -1]
    np.testing.assert_array_equal(routed(third), expected)


def test_another_programs_prefix_brings_its_experts(desk: Desk, folder: Path):
    context = prompt(60)
    for i in range(3):
        desk.submit(str(i), context, routed_experts=True, sampling={"seed": i})
    desk.run()
    assert desk.core.load().cached_tokens > 0
    for i in range(3):
        expected = chosen(load(folder).module, context + desk.reply(str(i)).token_ids)[:-1]
        np.testing.assert_array_equal(routed(desk.reply(str(i))), expected)


def test_an_aborted_request_has_the_experts_of_what_it_computed(desk: Desk):
    desk.submit("a", prompt(20), max_new_tokens=30, routed_experts=True)
    for _ in range(5):
        desk.core.step()
    desk.core.abort("a")
    reply = desk.reply("a")
    assert len(routed(reply)) == 20 + len(reply.token_ids) - 1


def test_new_weights_bring_new_experts(desk: Desk, tmp_path: Path):
    new = load(make_folder(tmp_path, "qwen3_moe", seed=8)).module
    desk.core.weights.stage(publish(tmp_path, new, "0.1"))
    desk.core.commit(CommitRequest(version="0.1"))
    reply = desk.turn("a", prompt(20), routed_experts=True)
    np.testing.assert_array_equal(routed(reply), chosen(new, prompt(20) + reply.token_ids)[:-1])


def test_more_experts_than_one_layer_of_keys_can_hold_are_kept(tmp_path: Path):
    # 4 layers with 40 experts a token: 160 numbers, and a token's keys hold 32 a layer.
    sizes = {"num_hidden_layers": 4, "num_experts": 64, "num_experts_per_tok": 40}
    desk = Desk(make_core(make_folder(tmp_path, "qwen3_moe", **sizes)))
    reply = desk.turn("a", prompt(9), routed_experts=True)
    assert routed(reply).shape == (16, 4, 40)
    found = np.sort(routed(reply), axis=-1)
    assert (np.diff(found, axis=-1) > 0).all(), "each expert once"
    assert int(found.min()) >= 0
    assert int(found.max()) < 64


def test_a_replayed_forward_in_the_trainer_gives_the_engines_log_probabilities(desk: Desk, policy: Policy):
    context = prompt(40)
    reply = desk.turn("a", context, max_new_tokens=30, routed_experts=True, sampling={"seed": 2})
    found = no_gradient(policy, context + reply.token_ids, len(context), routed(reply))
    np.testing.assert_allclose(found.numpy(), reply.logprobs, atol=1e-4, rtol=0)


def test_without_replay_weights_that_moved_choose_other_experts(desk: Desk, policy: Policy):
    context = prompt(40)
    reply = desk.turn("a", context, max_new_tokens=30, routed_experts=True)
    token_ids = context + reply.token_ids
    routers = policy.routers
    assert routers is not None
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if name.endswith("gate.weight"):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    with routers.recording() as seen:
        replayed = no_gradient(policy, token_ids, len(context), routed(reply))
    ran = torch.stack(seen, dim=1)
    np.testing.assert_array_equal(ran.numpy(), routed(reply))
    with routers.recording() as seen:
        own = no_gradient(policy, token_ids, len(context), None)
    assert (torch.stack(seen, dim=1).numpy() != routed(reply)).any()
    assert float((own - replayed).abs().max()) > 1e-3


def test_a_token_without_known_experts_takes_its_own(policy: Policy):
    token_ids = prompt(20)
    own = no_gradient(policy, token_ids, 1, None)
    unknown = np.full((20, LAYERS, TOP_K), UNKNOWN, dtype=np.int16)
    torch.testing.assert_close(no_gradient(policy, token_ids, 1, unknown), own)


def test_experts_1_and_2_run_with_present_weights_and_expert_3_does_not(policy: Policy):
    """The gradient reaches the given experts and the router's logits over them, and no other expert."""
    token_ids = prompt(12)
    given = np.broadcast_to(np.array([1, 2], dtype=np.int16), (12, LAYERS, TOP_K))
    before = logprobs(policy, token_ids, 1, given)
    before.sum().backward()  # pyright: ignore[reportUnknownMemberType]
    experts = {name: p for name, p in policy.module.named_parameters() if "experts" in name}
    for parameter in experts.values():
        assert parameter.grad is not None
        moved = parameter.grad.flatten(1).abs().amax(1) > 0
        assert as_list(moved.nonzero().flatten()) == [1, 2]
    gates = [p.grad for name, p in policy.module.named_parameters() if name.endswith("gate.weight")]
    assert all(gradient is not None and bool((gradient.abs() > 0).any()) for gradient in gates)
    with torch.no_grad():
        change(experts, 3)
        torch.testing.assert_close(logprobs(policy, token_ids, 1, given), before)
        change(experts, 2)
        assert not torch.allclose(logprobs(policy, token_ids, 1, given), before)


def change(experts: dict[str, nn.Parameter], number: int) -> None:
    for parameter in experts.values():
        parameter[number] += 0.1


def test_replayed_weights_are_differentiable_by_the_router(policy: Policy):
    """By finite differences, in float64."""
    module = policy.module.double()
    router = next(part for part in module.modules() if hasattr(part, "top_k"))
    routers = Routers([router])
    states = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = torch.tensor([[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[0, 7]]])
    weight = cast("nn.Parameter", router.weight)

    def weights(value: Tensor) -> Tensor:
        with routers.replaying(given):
            output: Any = torch.func.functional_call(router, {"weight": value}, (states,))
        # Softmax is float32 inside, as in generation.
        return output[1].float()

    check = cast("Callable[..., bool]", torch.autograd.gradcheck)
    value = weight.detach().clone().requires_grad_()
    assert check(weights, (value,), eps=1e-2, atol=1e-2, rtol=1e-2)


def test_a_dense_model_has_no_routers_and_refuses_to_return_experts(tmp_path: Path):
    desk = Desk(make_core(make_folder(tmp_path)))
    assert Feature.ROUTED_EXPERTS not in desk.core.capabilities().features
    assert find_routers(load(tmp_path).module) is None


def test_a_router_that_weighs_by_another_rule_is_not_taken(folder: Path):
    def doubled(_router: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> object:
        return output[0], output[1] * 2, output[2]

    module = load(folder).module
    for part in module.modules():
        if hasattr(part, "norm_topk_prob"):
            cast("Any", part).register_forward_hook(doubled)
    assert find_routers(module) is None
