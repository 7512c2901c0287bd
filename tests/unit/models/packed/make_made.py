"""Packs small weights with the tools' own code, for test_made.py: made_*.safetensors.

It needs an environment of its own. Of GPTQModel the sources are enough, which are not compiled; of
AutoGPTQ and AutoAWQ only the modules that pack are imported, as the packages do not load beside
this transformers:

    python3 -m venv tools
    tools/bin/pip install torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0 \
        nvidia-modelopt==0.47.0 accelerate omegaconf logbar tokenicer device-smi pypcre \
        random-word threadpoolctl defuser
    tools/bin/pip install --no-deps --no-build-isolation auto-gptq==0.7.1 autoawq==0.2.9
    tools/bin/pip download --no-deps --no-binary gptqmodel gptqmodel==7.7.0
    tar xzf gptqmodel-7.7.0.tar.gz
    PYTHONPATH=gptqmodel-7.7.0 tools/bin/python tests/unit/models/packed/make_made.py

Every case is one weight of 32 rows and 32 columns in groups of 16, and the values that the tool's
own code makes of it again, with its scales in float32.
"""

import importlib
import importlib.metadata
import json
import sys
import types
from pathlib import Path

import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from gptqmodel.version import __version__ as gptqmodel_version
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import save_file

FOLDER = Path(__file__).parent
SIZE, GROUP = 32, 16
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
E2M1 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "group_size": GROUP,
    "strategy": "tensor_group",
    "dynamic": False,
}


def part(package, module):
    """A module of a package, whose folders are entered without running what they begin with."""
    found = importlib.metadata.distribution(package).locate_file("")
    names = module.split(".")
    for end in range(1, len(names)):
        name = ".".join(names[:end])
        folder = types.ModuleType(name)
        folder.__path__ = [str(Path(found, *names[:end]))]
        sys.modules[name] = folder
    return importlib.import_module(module)


def drawn(seed, bits=4, symmetric=False, order=None):
    """A linear, and the scales and zero points [rows, groups] to round it with."""
    generator = torch.Generator().manual_seed(seed)
    linear = torch.nn.Linear(SIZE, SIZE, bias=False)
    linear.weight.data = torch.randn(SIZE, SIZE, generator=generator)
    columns = torch.arange(SIZE) // GROUP if order is None else order
    groups = [linear.weight.data[:, columns == one] for one in range(SIZE // GROUP)]
    low = torch.stack([one.amin(-1) for one in groups], -1).clamp(max=0)
    high = torch.stack([one.amax(-1) for one in groups], -1).clamp(min=0)
    levels = 2**bits - 1
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = ((high - low) / levels).half().float()
    zero = torch.round(-low / scale).clamp(1, levels)
    if symmetric:
        zero = torch.full_like(zero, (levels + 1) // 2)
    # codes stay within their bits, as a quantiser would have them
    spread, offset = scale[:, columns], zero[:, columns]
    codes = torch.round(linear.weight.data / spread + offset).clamp(0, levels)
    linear.weight.data = (codes - offset) * spread
    return linear, scale, zero


def auto_gptq(seed, bits=4, symmetric=False, is_ordered=False):
    module = part("auto-gptq", "auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    order = torch.arange(SIZE) // GROUP
    if is_ordered:
        order = order[torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))]
    linear, scale, zero = drawn(seed, bits, symmetric, order)
    packed = module(bits, GROUP, SIZE, SIZE, bias=False)
    packed.pack(linear, scale.clone(), zero.clone(), order.int())
    values = packed.forward(torch.eye(SIZE)).T
    parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "g_idx")}
    said = {**GPTQ, "bits": bits, "sym": symmetric, "desc_act": is_ordered}
    return said, {**parts, "scales": packed.scales.half()}, values


def gptqmodel_case(seed, version):
    linear, scale, zero = drawn(seed)
    packed = TorchLinear(
        bits=4,
        group_size=GROUP,
        sym=False,
        desc_act=False,
        in_features=SIZE,
        out_features=SIZE,
        bias=False,
        register_buffers=True,
    )
    packed.pack(linear, scale, zero, torch.arange(SIZE) // GROUP)
    packed.post_init()
    parts = {"scales": packed.scales}
    packed.scales = packed.scales.float()
    values = packed.dequantize_weight().T
    if version == "gptq":
        convert_gptq_v2_to_v1_format_module(packed, types.SimpleNamespace(bits=4, pack_dtype=None))
    parts |= {"qweight": packed.qweight, "qzeros": packed.qzeros, "g_idx": packed.g_idx.int()}
    return {**GPTQ, "checkpoint_format": version}, parts, values


def auto_awq(seed):
    gemm = part("autoawq", "awq.modules.linear.gemm")
    linear, scale, zero = drawn(seed)
    packed = gemm.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scale.T, zeros=zero.T)
    parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    values = gemm.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, GROUP).T
    return AWQ, parts, values


def modelopt_case(seed):
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    packed, scale, over = NVFP4QTensor.quantize(weight, GROUP)
    values = packed.dequantize(
        torch.float32, scale=scale, double_scale=over, block_sizes={-1: GROUP}
    )
    parts = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": over}
    return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, parts, values


def compressed_case(seed):
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    over = (448 * 6 / weight.abs().max()).reshape(1)
    groups = weight.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1) * over / 6).to(torch.float8_e4m3fn)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**E2M1))
    state = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": over}
    parts = dict(NVFP4PackedCompressor.compress(state, scheme))
    codes = unpack_fp4_from_uint8(parts["weight_packed"], SIZE, SIZE, dtype=torch.float32)
    values = dequantize(  # as its decompress does, there in bfloat16
        codes, parts["weight_scale"].float(), args=scheme.weights, global_scale=over
    )
    said = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": E2M1}},
    }
    return said, parts, values


def write(path, cases):
    names = ("auto-gptq", "autoawq", "compressed-tensors", "nvidia-modelopt", "torch")
    versions = {name: importlib.metadata.version(name) for name in names}
    versions["gptqmodel"] = gptqmodel_version
    tensors, configs = {}, {}
    for name, (config, parts, values) in cases.items():
        configs[name] = config
        assert values.dtype is torch.float32
        for key, one in {**parts, "values": values}.items():
            tensors[f"{name}|{key}"] = one.detach().contiguous()
    metadata = {"configs": json.dumps(configs), "versions": json.dumps(versions)}
    save_file(tensors, path, metadata=metadata)
    path.chmod(0o644)


def main():
    write(
        FOLDER / "made_gptq.safetensors",
        {
            "AutoGPTQ 4": auto_gptq(1),
            "AutoGPTQ 4 sym": auto_gptq(2, symmetric=True),
            "AutoGPTQ 8": auto_gptq(3, bits=8),
            "AutoGPTQ 4 desc_act": auto_gptq(4, is_ordered=True),
            "AutoAWQ": auto_awq(5),
            "GPTQModel v2": gptqmodel_case(6, "gptq_v2"),
            "GPTQModel v1": gptqmodel_case(7, "gptq"),
        },
    )
    write(
        FOLDER / "made_nvfp4.safetensors",
        {"compressed-tensors NVFP4": compressed_case(8), "ModelOpt NVFP4": modelopt_case(9)},
    )


if __name__ == "__main__":
    main()
