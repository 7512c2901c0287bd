"""Weights in few bits: their values, joining them, and how floats become them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from flashdraft.errors import CheckpointError, RequestError
from flashdraft.kernels import quantized
from flashdraft.kernels.kinds import Scheme, quantized_bytes
from flashdraft.kernels.quantized import LARGEST_FP8, Quantized, quantize, stack_experts, stack_rows

ON_THE_FLY = [Scheme.INT4, Scheme.INT8, Scheme.FP8]


def random_weight(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def relative_error(weight: Tensor, coded: Quantized) -> float:
    return float((coded.dequantize() - weight).square().sum() / weight.square().sum())


def two_level() -> Quantized:
    """Like a K-quant: integer scales and minimums under float16 ones."""
    generator = torch.Generator().manual_seed(3)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator).to(torch.uint8)

    return Quantized(
        Scheme.INT4,
        integers(16, 6, 512),
        integers(64, 6, 16),
        group=32,
        minimum=integers(64, 6, 16),
        super_scale=random_weight(6, 2).half(),
        super_minimum=random_weight(6, 2, seed=1).half(),
    )


def test_a_value_is_its_scale_times_its_code_less_the_minimum() -> None:
    coded = two_level()
    assert coded.super_scale is not None and coded.super_minimum is not None
    assert coded.minimum is not None
    values = coded.dequantize()
    for row, column in ((0, 0), (2, 31), (3, 32), (5, 511), (4, 255), (4, 256)):
        at, over = column // 32, column // 256
        scale = coded.super_scale[row, over].float() * coded.scale[row, at].float()
        minimum = coded.super_minimum[row, over].float() * coded.minimum[row, at].float()
        code = coded.codes[row, column].float()
        assert values[row, column] == scale * code - minimum


def test_zero_is_the_code_of_nothing() -> None:
    codes = torch.tensor([[8, 0, 15, 9] * 4], dtype=torch.uint8)
    coded = Quantized(Scheme.INT4, codes, torch.tensor([[0.5]]), group=16, zero=8)
    assert coded.dequantize()[0, :4].tolist() == [0.0, -4.0, 3.5, 0.5]


@pytest.mark.parametrize("scheme", ON_THE_FLY)
def test_large_weights_are_worked_on_in_pieces(
    scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight(3, 50, 96)
    whole = quantize(weight, scheme)
    values = whole.dequantize()
    monkeypatch.setattr(quantized, "_PIECE", 7 * 96)  # rows in sevens, over the experts' borders
    pieces = quantize(weight, scheme)
    assert torch.equal(pieces.scale, whole.scale)
    assert torch.equal(pieces.dequantize(), values)
    assert torch.equal(whole.dequantize(torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("scheme", ON_THE_FLY)
def test_rows_and_experts_are_selected_as_their_values_are(scheme: Scheme) -> None:
    coded = quantize(random_weight(4, 10, 64), scheme)
    values, index = coded.dequantize(), torch.tensor([9, 0, 0, 3])
    assert torch.equal(coded.rows(index).dequantize(), values[:, index])
    assert torch.equal(coded.expert(2).dequantize(), values[2])
    assert coded.expert(2).shape == (10, 64) and coded.device == torch.device("cpu")


def test_rows_keep_both_levels_of_scales() -> None:
    coded, index = two_level(), torch.tensor([5, 1])
    assert torch.equal(coded.rows(index).dequantize(), coded.dequantize()[index])


@pytest.mark.parametrize("scheme", ON_THE_FLY)
def test_weights_of_one_format_are_joined(scheme: Scheme) -> None:
    parts = [quantize(random_weight(rows, 64, seed=rows), scheme) for rows in (8, 3)]
    joined = stack_rows(parts)
    assert joined is not None and joined.shape == (11, 64)
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    stacked = stack_experts([parts[0], parts[0]])
    assert stacked.shape == (2, 8, 64)
    assert torch.equal(stacked.dequantize()[1], parts[0].dequantize())


@pytest.mark.parametrize(
    "other",
    [
        quantize(random_weight(8, 64), Scheme.INT8),
        quantize(random_weight(8, 64), Scheme.INT4, group=16),
        dataclasses.replace(quantize(random_weight(8, 64), Scheme.INT4), zero=7),
        dataclasses.replace(
            quantize(random_weight(8, 64), Scheme.INT4), minimum=torch.zeros(8, 2).half()
        ),
    ],
    ids=["scheme", "group", "zero", "minimum"],
)
def test_weights_of_different_formats_are_not_joined(other: Quantized) -> None:
    first = quantize(random_weight(8, 64), Scheme.INT4)
    assert stack_rows([first, other]) is None
    with pytest.raises(CheckpointError, match="different formats"):
        stack_experts([first, other])


def test_experts_of_different_shapes_are_not_joined() -> None:
    with pytest.raises(CheckpointError, match="different formats"):
        stack_experts([quantize(random_weight(rows, 64), Scheme.INT4) for rows in (8, 9)])


def test_bytes_are_those_of_packed_codes() -> None:
    shape, values = (6, 512), 6 * 512
    assert quantize(random_weight(*shape), Scheme.INT4).num_bytes == values // 2 + values // 32 * 2
    assert quantize(random_weight(*shape), Scheme.INT8).num_bytes == values + values // 32 * 2
    assert quantize(random_weight(*shape), Scheme.FP8).num_bytes == values + 6 * 4
    for scheme in ON_THE_FLY:
        coded = quantize(random_weight(3, 6, 704), scheme)
        assert coded.num_bytes == quantized_bytes((3, 6, 704), scheme)
    assert two_level().num_bytes == values // 2 + 2 * values // 32 + 2 * 2 * values // 256
    codes = torch.zeros(shape, dtype=torch.uint8)
    six = Quantized(Scheme.INT6, codes, torch.zeros(6, 32, dtype=torch.int8), 16, 32)
    assert six.num_bytes == values * 3 // 4 + values // 16


@pytest.mark.parametrize(
    ("scheme", "group", "limit"),
    [
        (Scheme.INT4, None, 6.8e-3),
        (Scheme.INT4, 16, 5.4e-3),
        (Scheme.INT4, 128, 9.7e-3),
        (Scheme.INT8, None, 3e-5),
        (Scheme.FP8, None, 8e-4),
        (Scheme.FP8, 128, 8e-4),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantised_values_are_near(
    scheme: Scheme, group: int | None, limit: float, dtype: torch.dtype
) -> None:
    weight = random_weight(64, 1024).to(dtype)
    assert relative_error(weight.float(), quantize(weight, scheme, group)) < limit


def test_searching_the_scale_saves_a_fifteenth_of_the_squared_error() -> None:
    weight = random_weight(64, 2048)
    groups = weight.view(-1, 32)
    peak = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    scale = (peak / -8).half().float()  # as Q4_0 is usually made
    usual = (groups / scale).round().clamp(-8, 7) * scale
    usual_error = float((usual - groups).square().sum() / groups.square().sum())
    found = relative_error(weight, quantize(weight, Scheme.INT4))
    assert found < usual_error * 14 / 15


def test_what_the_grid_holds_comes_back_exactly() -> None:
    """Weights trained for Q4_0 lie on its grid; coding them again must lose nothing."""
    codes = torch.randint(0, 16, (16, 256), generator=torch.Generator().manual_seed(1))
    codes[:, ::32] = 0  # the full range is in use
    scale = random_weight(16, 8).abs().half().float()
    weight = (codes - 8).float() * scale.repeat_interleave(32, 1)
    assert torch.equal(quantize(weight, Scheme.INT4).dequantize(), weight)


@pytest.mark.parametrize("scheme", ON_THE_FLY)
def test_zeros_and_tiny_values(scheme: Scheme) -> None:
    weight = torch.zeros(3, 64)
    weight[1] = 1e-12  # below the smallest float16 scale
    weight[2, 7] = -1e-40
    values = quantize(weight, scheme).dequantize()
    assert values.isfinite().all() and not values[0].any()
    assert (values - weight).abs().max() <= 1e-9


@pytest.mark.parametrize(
    ("depth", "group", "expected"),
    [(704, 128, 64), (2112, 128, 64), (48, 32, 16), (5376, 128, 128)],
)
def test_a_group_that_does_not_divide_gives_way(depth: int, group: int, expected: int) -> None:
    assert quantize(random_weight(2, depth), Scheme.INT4, group).group == expected


def test_rows_that_no_group_divides_are_refused_with_their_length() -> None:
    with pytest.raises(RequestError, match="rows of 100 values.*fp8"):
        quantize(random_weight(2, 100), Scheme.INT4)
    assert quantize(random_weight(2, 100), Scheme.FP8).group == 100


def test_wrong_requests() -> None:
    with pytest.raises(RequestError, match="int6 is a format of files"):
        quantize(random_weight(2, 64), Scheme.INT6)
    with pytest.raises(RequestError, match="group is 48; it must be one of 16, 32, 64, 128"):
        quantize(random_weight(2, 96), Scheme.INT8, 48)


@pytest.mark.parametrize("scheme", ON_THE_FLY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(scheme: Scheme, bad: float) -> None:
    weight = random_weight(4, 64)
    weight[3, 63] = bad
    with pytest.raises(CheckpointError, match="not finite"):
        quantize(weight, scheme)


def test_the_largest_fp8_is_that_of_the_type() -> None:
    assert torch.finfo(torch.float8_e4m3fn).max == LARGEST_FP8


def test_values_beyond_the_scales_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"-1e\+06 to 0; int4 reaches 458528"):
        quantize(torch.tensor([[-1e6, *[0.0] * 31]]), Scheme.INT4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(8, 64, dtype=torch.int8)}, "torch.int8"),
        ({"group": 48}, "groups of 48"),
        ({"scale": torch.zeros(8, 3)}, r"scale is \[8, 3\]; it must be \[8, 2\]"),
        ({"minimum": torch.zeros(2, 8)}, r"minimum is \[2, 8\]"),
        ({"super_scale": torch.zeros(8, 1)}, r"super_scale is \[8, 1\]; it must be \[8, 0\]"),
    ],
)
def test_tensors_that_do_not_fit_each_other(change: dict[str, object], message: str) -> None:
    coded = quantize(random_weight(8, 64), Scheme.INT4)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(coded, **change)
