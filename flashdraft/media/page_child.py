"""What runs in a killable process of PDF documents alone: one of its pages becomes a picture.

python -m flashdraft.media.page_child DESCRIPTOR; decoding.py starts it. No other process of ours
loads PDFium. A page is drawn with a fixed number of pixels, however large its paper is, and then is
a picture like others. No script in it runs.
"""

from __future__ import annotations

import math
import sys

import pypdfium2
from PIL import Image

from flashdraft.errors import quoted, shortened
from flashdraft.killable.child import RefusalError, serve
from flashdraft.killable.frames import DATA, Message
from flashdraft.media.child import fitted, warm_up
from flashdraft.media.kinds import PDF_HEAD_BYTES
from flashdraft.media.limits import MAX_SIDE

_OVERSIZE = 4  # pixels drawn for each that is left when the page is resized
_TAIL_BYTES = 4096  # among them a PDF says that it ends
_SHOWN_BYTES = 24


def answer(message: Message) -> Message:
    """One message's answer; RefusalError, of the kind "PDF", where there is none."""
    if message["type"] == "load":
        warm_up()
        return {}
    budget, cell = message["budget"], message["cell"]
    document = _opened(message[DATA])
    try:
        count = len(document)
        if count == 0:
            raise _damaged("it has no page")
        if count > message["max_pages"]:
            raise RefusalError(
                "PDF",
                f"It has {count} pages; at most {message['max_pages']} are taken here. Send the "
                "pages that matter as a document of their own.",
            )
        page = _drawn(document, message["page"], _OVERSIZE * budget * cell**2)
    finally:
        document.close()
    return {"pages": count, **fitted(page, budget, cell)}


def _opened(data: bytes) -> pypdfium2.PdfDocument:
    if b"%PDF-" not in data[:PDF_HEAD_BYTES]:
        begin = quoted(data[:_SHOWN_BYTES].decode("latin-1"))
        raise RefusalError("PDF", f"It is no PDF: it begins with {begin}. Save it as one.")
    if b"%%EOF" not in data[-_TAIL_BYTES:]:
        raise _damaged("its end is missing")
    try:
        document = pypdfium2.PdfDocument(data)
        if document.get_formtype():  # what was filled in is drawn too
            document.init_forms()
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise RefusalError(
                "PDF",
                "It is encrypted and opens with a password alone. Save it without one.",
                retire=True,  # the library would say so of the next one that it cannot open
            ) from None
        raise _damaged(shortened(error).rstrip(".")) from None
    return document


def _drawn(document: pypdfium2.PdfDocument, number: int, num_pixels: int) -> Image.Image:
    """A page on white, of about so many pixels."""
    try:
        page = document[number]
        width, height = page.get_size()
        name = f"Page {number + 1}"
        if not (width > 0 and height > 0 and math.isfinite(width * height)):
            raise RefusalError(
                "PDF", f"{name} is {width:g} x {height:g} points large: it has none."
            )
        scale = math.sqrt(num_pixels / (width * height))
        if scale * max(width, height) > MAX_SIDE:
            raise RefusalError(
                "PDF",
                f"{name} is {width:g} x {height:g} points large: too long for its other side. Give "
                "it a usual size.",
            )
        return page.render(scale=scale).to_pil().convert("RGB")
    except pypdfium2.PdfiumError as error:
        raise _damaged(f"page {number + 1}: {shortened(error).rstrip('.')}") from None


def _damaged(what: str) -> RefusalError:
    return RefusalError(
        "PDF", f"It is damaged or cut off: {what}. Send the whole file, or save it anew."
    )


def main() -> int:
    """The process."""
    serve(int(sys.argv[1]), answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
