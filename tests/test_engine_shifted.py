"""Attention of chunks as products in bfloat16, against float64."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sostenuto.runtime.engines.embedded import shifted
from sostenuto.runtime.engines.embedded.attention import Chunk, Decode

_HEADS, _KEY_HEADS, _SIZE = 6, 2, 16


def _drawn(count: int, end: int, spread: float = 2.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count * 10_000 + end)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * spread).to(torch.bfloat16)

    return draw(_HEADS, count, _SIZE), draw(_KEY_HEADS, end, _SIZE), draw(_KEY_HEADS, end, _SIZE)


def _exact(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """Written out: softmax(q k / sqrt(D)) v in float64 over what each query sees."""
    count, end = query.shape[1], keys.shape[1]
    groups = query.shape[0] // keys.shape[0]
    places, others = torch.arange(end - count, end)[:, None], torch.arange(end)
    seen = others <= places
    if window is not None:
        seen &= others > places - window
    wide_keys, wide_values = (tensor.double().repeat_interleave(groups, 0) for tensor in (keys, values))
    scores = query.double() @ wide_keys.transpose(1, 2) / _SIZE**0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ wide_values


@pytest.mark.parametrize("window", [None, 1, 7, 200])
@pytest.mark.parametrize(("count", "end"), [(16, 16), (40, 90), (128, 128), (129, 300), (300, 301)])
def test_chunks_are_attended_as_exactly_as_bfloat16_allows(count: int, end: int, window: int | None):
    query, keys, values = _drawn(count, end)
    exact = _exact(query, keys, values, window)
    out = shifted.attend(query, keys, values, None, window)
    assert out.dtype is torch.bfloat16
    assert (out.double() - exact).abs().max() <= 2**-7 * values.abs().max()


def test_errors_are_near_those_of_torchs_own_kernel_also_where_scores_are_large():
    query, keys, values = _drawn(64, 200, spread=4.0)
    exact = _exact(query, keys, values, None)
    seen = torch.ones(64, 200, dtype=torch.bool).tril(200 - 64)
    own = scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=seen, enable_gqa=True
    )[0]

    def error(out: torch.Tensor) -> float:
        return float((out.double() - exact).square().mean().sqrt())

    plain = (query @ keys.repeat_interleave(3, 0).transpose(1, 2) * _SIZE**-0.5).masked_fill(
        ~seen, -torch.inf
    )
    rounded = plain.softmax(-1) @ values.repeat_interleave(3, 0)
    ours = error(shifted.attend(query, keys, values, None, None))
    assert ours <= 2 * error(own)
    assert error(rounded) > 2 * ours


def test_a_chunk_is_attended_the_same_by_either_kernel(monkeypatch: pytest.MonkeyPatch):
    count, start = 48, 70
    query, keys, values = _drawn(count, start + count)

    def attended(*, products: bool) -> torch.Tensor:
        def is_faster(_heads: int, _size: int) -> bool:
            return products

        monkeypatch.setattr(shifted, "_is_faster", is_faster)
        kept = (keys[None].clone(), values[None].clone())
        chunk = Chunk(0, *kept, start, count)
        return chunk.attend(0, query, keys[:, start:], values[:, start:], None, None)

    one, other = attended(products=True), attended(products=False)
    assert one.shape == (count, _HEADS, _SIZE)
    assert torch.allclose(one.float(), other.float(), atol=0.1, rtol=0.02)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_other_types_go_by_torchs_own_kernel(kind: torch.dtype):
    assert not shifted.suits(torch.zeros(4, 64, 16, dtype=kind))


def test_rows_of_unlike_lengths_are_attended_as_those_of_like_ones():
    lengths = (5, 40, 17)
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(1, 3, _KEY_HEADS, 64, _SIZE, generator=generator) for _ in range(2))
    query = torch.randn(_HEADS, 3, _SIZE, generator=generator)
    key, value = (torch.randn(_KEY_HEADS, 3, _SIZE, generator=generator) for _ in range(2))

    def attended(rows: tuple[int, ...], longest: int) -> torch.Tensor:
        decode = Decode(
            0, keys[:, list(rows)], values[:, list(rows)], (1,) * len(rows),
            torch.tensor([lengths[row] - 1 for row in rows]), longest,
        )  # fmt: skip
        own, new_key, new_value = (tensor[:, list(rows)] for tensor in (query, key, value))
        return decode.attend(0, own, new_key, new_value, None, None)

    together = attended((0, 1, 2), 40)
    alone = torch.cat([attended((row,), lengths[row]) for row in range(3)])
    assert torch.allclose(together, alone, atol=1e-6)
