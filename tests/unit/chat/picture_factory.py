"""What conversations with pictures are tested with: a tower's facts, templates, an opener."""

from __future__ import annotations

import hashlib

from flashdraft.core import Picture
from flashdraft.media.pictures import PictureRules
from flashdraft.media.sizes import cells_of
from flashdraft.models.config.vision import VisionConfig, VisionTokens
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.chat.chat_factory import GEMMA4_DATA, GEMMA4_MARKS, byte_tokenizer

PICTURE_MARKS = ["<|image>", "<|image|>", "<image|>", "<|video|>"]
CELL = 12  # pixels

# In the manner of Gemma 4's: every copy of its template has a way of its own with pictures.
_RESULT = (
    "{% for c in m.tool_calls or [] %}<|tool_call>{{ c.function.name }}<tool_call|>{% endfor %}"
    "{% if m['role'] == 'tool' %}<|tool_response>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<tool_response|>@BEHIND@"
    "{% else %}"
)
_WITH_RESULTS = (
    "{% for m in messages %}<|turn>{{ m.role }}\n"
    + _RESULT
    + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}"
    "{% if p.type == 'text' %}{{ p.text | trim }}{% elif p.type == 'image' %}<|image|>{% endif %}"
    "{% endfor %}{% endif %}{% endif %}<turn|>\n{% endfor %}"
    "{% if tools %}{% endif %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
_PICTURES_BEHIND = (
    "{% if m.content is not string %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|image|>{% endif %}{% endfor %}{% endif %}"
)
DROPS_IN_RESULTS = _WITH_RESULTS.replace("@BEHIND@", "")
BEHIND_RESULTS = _WITH_RESULTS.replace("@BEHIND@", _PICTURES_BEHIND)
NO_TOOLS = (
    "{% for m in messages %}<|turn>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}<|image|>{% endif %}"
    "{% endfor %}{% endif %}<turn|>\n{% endfor %}"
)
TEXT_ONLY = "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"


def stored_template() -> str | None:
    """Gemma 4's own, where this machine has it."""
    path = GEMMA4_DATA / "chat_template.jinja"
    return path.read_text(encoding="utf-8") if path.is_file() else None


def picture_tokenizer(template: str) -> Tokenizer:
    return byte_tokenizer(GEMMA4_MARKS + PICTURE_MARKS, [], template)


def vision_tokens(tokenizer: Tokenizer) -> VisionTokens:
    begin, picture, end, video = (tokenizer.token_id(mark) for mark in PICTURE_MARKS)
    assert begin is not None and picture is not None and end is not None
    return VisionTokens(begin, picture, end, video)


def vision_config(tokens: VisionTokens) -> VisionConfig:
    return VisionConfig(
        hidden_size=48,
        intermediate_size=80,
        num_layers=3,
        num_heads=2,
        head_dim=24,
        patch_size=4,
        pooling=3,
        num_positions=64,
        rope_theta=100.0,
        norm_eps=1e-6,
        standardize=True,
        clipped=False,
        default_budget=280,
        tokens=tokens,
    )


def open_by_name(data: bytes, rules: PictureRules) -> Picture:
    """What stands for opening: the bytes are a size, as b"640x480"."""
    width, height = map(int, data.split(b"x"))
    cells = cells_of(width, height, rules.budget, rules.cell)
    width, height = cells.columns * rules.cell, cells.rows * rules.cell
    pixels = hashlib.sha256(data).digest()[:1] * (3 * width * height)
    return Picture(pixels, width, height, cells.num_tokens, hashlib.sha256(pixels).digest())
