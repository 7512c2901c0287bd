"""Has PEFT make LoRA adapters of a tiny Llama and merge them: made.safetensors, for the tests.

It needs an environment of its own:

    python3 -m venv tools
    tools/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2
    tools/bin/python tests/unit/models/adapters/make_made.py

Every case is an adapter as PEFT saves it, with its config, and the weights that it changes before
and after PEFT's own merge.
"""

import json
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent
LLAMA = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-05,
}
CASES = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]},
    "rslora": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["gate_proj", "v_proj", "lm_head"],
        "use_rslora": True,
    },
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"layers.0.mlp.up_proj": 3},
    },
    "whole": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["o_proj"],
        "modules_to_save": ["lm_head", "norm"],
    },
    "embedding": {"r": 2, "lora_alpha": 4, "target_modules": ["k_proj", "embed_tokens"]},
}


def make(said, seed):
    """An adapter's config and tensors, and the weights before and after the merge."""
    torch.manual_seed(seed)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    before = {name: one.clone() for name, one in base.state_dict().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **said))
    for name, one in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:  # which begin with zeros, or as the model
            one.data = torch.randn_like(one)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        adapter = load_file(Path(folder) / "adapter_model.safetensors")
    after = model.merge_and_unload().state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    parts = {f"adapter|{name}": one for name, one in adapter.items()}
    parts |= {f"base|{name}": before[name] for name in changed}
    parts |= {f"merged|{name}": after[name] for name in changed}
    return config, parts


def main():
    tensors, configs = {}, {}
    for seed, (case, said) in enumerate(CASES.items()):
        configs[case], parts = make(said, seed)
        for key, one in parts.items():
            tensors[f"{case}|{key}"] = one.detach().clone().contiguous()
    versions = {one.__name__: one.__version__ for one in (peft, transformers, torch)}
    metadata = {name: json.dumps(one) for name, one in (("configs", configs), ("config", LLAMA))}
    metadata["versions"] = json.dumps(versions)
    save_file(tensors, FOLDER / "made.safetensors", metadata=metadata)
    (FOLDER / "made.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
