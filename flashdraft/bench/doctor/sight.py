"""Whether the target sees pictures here: its tower, and the process that opens what is shown.

The pair itself is loaded without its tower; drafting has nothing to do with it.
"""

from __future__ import annotations

import base64

from flashdraft.bench.doctor.report import OK, PROBLEM, WARNING, Finding
from flashdraft.errors import FlashdraftError
from flashdraft.media.kinds import FILM, PDF, is_readable
from flashdraft.media.pictures import PictureRules, open_picture
from flashdraft.media.sizes import BUDGETS
from flashdraft.models.config.vision import NO_TOWER
from flashdraft.models.sources import resolve_source
from flashdraft.models.stored import BARE, open_stored

_AREA = "pictures"
# a PNG of one grey pixel
_PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)


def check_sight(model: str) -> list[Finding]:
    """Nothing to say of a model that has no tower and never had."""
    config = open_stored(resolve_source(model).path, BARE, vision=True).config
    if config.vision is None:
        why = config.why_no_vision
        if why in (None, NO_TOWER):
            return []
        return [Finding(_AREA, WARNING, "pictures will be refused", f"{why} Text is not affected.")]
    try:
        open_picture(_PICTURE, PictureRules(config.vision.cell, BUDGETS[0]))
    except FlashdraftError as error:
        text = f"the model sees, but no picture can be opened here: {error}"
        return [Finding(_AREA, PROBLEM, text, "install Pillow anew: pip install -U pillow")]
    usual = config.vision.default_budget
    text = f"the model sees, {usual} tokens a picture unless asked otherwise; a test picture opens"
    found = [Finding(_AREA, OK, text)]
    missing = [kind for kind in (FILM, PDF) if not is_readable(kind)]
    if missing:
        nouns = " and ".join(f"{kind.noun}s" for kind in missing)
        extras = ",".join(kind.extra for kind in missing)
        remedy = f"to read them, pip install 'flashdraft[{extras}]'"
        found.append(Finding(_AREA, OK, f"{nouns} will be refused", remedy))
    return found
