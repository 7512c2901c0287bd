"""What files and what they hold may be at most; both ends of the processes agree on it."""

MIB = 1024 * 1024
MAX_BYTES = 40 * MIB  # of a file
MAX_PIXELS = 50_000_000
MAX_SIDE = 65_535
FORMATS = "PNG, JPEG, WebP or GIF"

FILM_FORMATS = "MP4, MOV, WebM or MKV"
NUM_FRAMES = 32  # of a film, as the models were trained
FRAME_BUDGET = 70  # tokens that a frame may take
MAX_FRAME_PIXELS = 4096 * 2304
MAX_FILM_FRAMES = 20_000  # in the file; all of them up to the last one shown are decoded
MAX_FILM_S = 6000  # a time is written with two digits of minutes
USUAL_FPS = 24  # where a film does not say

MAX_PAGES = 64  # of a PDF
PAGE_BUDGET = 560  # tokens of a page, where nothing else is said


def page_budget(default_budget: int, given: int | None) -> int:
    """How many tokens a page may take: more than a picture, for it is text in small letters."""
    return max(PAGE_BUDGET, default_budget) if given is None else given
