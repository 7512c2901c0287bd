"""What a picture may be at most, in bytes and pixels; both ends of the process agree on it."""

MIB = 1024 * 1024
MAX_BYTES = 40 * MIB  # of a file
MAX_PIXELS = 50_000_000
MAX_SIDE = 65_535
FORMATS = "PNG, JPEG, WebP or GIF"
