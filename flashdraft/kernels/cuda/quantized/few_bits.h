// What a weight in few bits is made of (layout.py), as tensor cores take it.
//
// With few rows a thread takes eight neighbours of a row, 16 bytes of a plane, for two instructions
// of a tensor core. That is another order of the depth than theirs, and free to choose if x is read
// in the same one. Of 32 values, instruction i has in place q the value 8c + 4i + 2(q / 8) + q % 2,
// where c is q % 8 / 2. With many rows the order is theirs.
//
// Codes become bfloat16 in registers, exactly: eight bits or fewer, read as one, are a tiny number
// in proportion to them, and one multiplication and addition make it large and take the zero point
// away. With few rows of x the scale of a group multiplies its sum in float32, so nothing of a format
// is rounded; with many rows it multiplies the weight (`scaled`).
//
// From the compiler's command line:
//   CODE    0: int4, 2: int8, 3: e4m3
//   WIDTH   of a plane: 32 or 64
//   SCALES  of a row in a step: 4, 2 or 1; 0 where a whole row has one
//   SCALE   what they are: 1 float16, 2 bfloat16, 3 float32
//   GATED   the weight is [gate | up], and a tile has as many rows of each; with GELU, or else SiLU

constexpr int LANES = 32;
constexpr int PLANES = CODE == 0 ? 4 : 2;
constexpr int STEP = PLANES * WIDTH;  // values of the depth in a unit
constexpr int GROUPS = STEP / 32;     // what a thread has of them goes into two instructions
constexpr int PER_SCALE = SCALES > 0 ? GROUPS / (SCALES > 0 ? SCALES : 1) : GROUPS;  // groups

constexpr int ROW_BYTES = 2 * WIDTH;
constexpr int HALF_LOADS = WIDTH / 32;  // of a thread, for eight rows: half a tile of sixteen
constexpr int ROW_SCALE_BYTES = SCALES * (SCALE == 3 ? 4 : 2);
constexpr int SCALE_BYTES = ROW_SCALE_BYTES == 2 ? 4 : ROW_SCALE_BYTES;  // with a neighbour's

constexpr int TILE_ROWS = GATED ? 8 : 16;  // from a tile of the weight to the next

// Integers are 2 ** -9 too small on their way, so that one factor serves all planes.
constexpr int GAIN = CODE == 3 ? 1 : 512;

// Units in a line, shared out: everybody has as many, and the first ones take one of those that are
// left over.
struct Line {
    int units_each, spare_units;

    DEVICE int first_unit(int whose) const {
        return whose * units_each + min_of(whose, spare_units);
    }
    DEVICE int owner_of(int unit) const {
        int rest = unit - spare_units * (units_each + 1);
        return rest < 0 ? unit / (units_each + 1) : spare_units + rest / units_each;
    }
};

// Two codes of a plane, with 128 added to int8's: as bfloat16 they are 2 ** exponent_of(plane) * GAIN
// times too small.
DEVICE u32 bits_of(u32 word, int plane) {
    if (CODE == 0) {
        return (plane < 2 ? word : word >> 8) & (plane % 2 == 0 ? 0x000F000F : 0x00F000F0);
    }
    if (CODE == 2) return ((plane == 0 ? word : word >> 8) & 0x00FF00FF) ^ 0x00800080;
    u32 sign = plane == 0 ? word << 8 : word;
    u32 rest = plane == 0 ? word << 4 : word >> 4;
    return (sign & 0x80008000) | (rest & 0x07F007F0);
}
DEVICE int exponent_of(int plane) {
    return CODE == 3 || (CODE == 0 && plane % 2 == 1) ? 120 : 124;
}
// Such codes as bfloat16, divided by GAIN.
DEVICE u32 unpack(u32 word, int plane, float zero) {
    u32 terms = CODE == 3 ? 0x80008000 : two_halves(-zero / GAIN);
    return fused(bits_of(word, plane), two_powers(exponent_of(plane)), terms);
}

// A scale as a bfloat16, twice, and what that leaves of it: sixteen bits of it together.
DEVICE void split_scale(float scale, u32 *parts) {
    parts[0] = two_bfloat16(scale, scale);
    float rest = scale - as_float(parts[0] & 0xFFFF0000);
    parts[1] = two_bfloat16(rest, rest);
}

// Two values times a scale, rounded once: codes of four bits and a float16 scale give products that
// leave nothing else to round. With other scales and codes they may differ from the nearest
// bfloat16 where two of them are nearly as near.
DEVICE u32 scaled(u32 two, const u32 *parts) {
    constexpr u32 MINUS_ZEROS = 0x80008000;
    return fused(two, parts[0], SCALE == 2 ? MINUS_ZEROS : fused(two, parts[1], MINUS_ZEROS));
}

// A tile of sixteen rows by 32 values of the depth, for two instructions.
struct Tile {
    Words first, second;
};
DEVICE Tile unpack_tile(Words low, Words high, int plane, float zero) {
    return {{unpack(low.x, plane, zero), unpack(high.x, plane, zero), unpack(low.y, plane, zero),
             unpack(high.y, plane, zero)},
            {unpack(low.z, plane, zero), unpack(high.z, plane, zero), unpack(low.w, plane, zero),
             unpack(high.w, plane, zero)}};
}

// The same for words of its two halves by turns.
DEVICE Words scaled(Words words, const u32 *low, const u32 *high) {
    return {scaled(words.x, low), scaled(words.y, high), scaled(words.z, low),
            scaled(words.w, high)};
}

DEVICE float half_at(u32 two, int place) {
    if (SCALE == 1) return float16_at(two, place);
    return place == 0 ? bfloat16(two) : as_float(two & 0xFFFF0000);
}

// The scale of a thread's row in a half, from what was fetched for it.
DEVICE float scale_of(const u32 *scales, int half, int place, int lane) {
    if (SCALE == 3) return as_float(scales[half]);
    if (SCALES == 4) return half_at(scales[2 * half + place / 2], place % 2);
    if (SCALES == 2) return half_at(scales[half], place);
    return half_at(scales[half] >> (lane / 4 % 2 * 16), 0);
}

DEVICE float activate(float gate) {
    float inner = GELU ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
    return divide(gate, 1.0f + exponential(-inner));
}

// Scales of two whole rows, if these have one.
DEVICE Two scales_of(const char *scale, int row, int other) {
    if (SCALES > 0) return {1.0f, 1.0f};
    return {((const float *)scale)[row], ((const float *)scale)[other]};
}

// What the sums of two rows of the weight give: two values of the result, or a gated one.
DEVICE Two end_two(float low, float high, Two scales) {
    low *= GAIN;
    high *= GAIN;
    if (SCALES == 0) {
        low *= scales.x;
        high *= scales.y;
    }
    if (GATED) low = rounded(activate(rounded(low))) * rounded(high);
    return {low, high};
}
