/* flashdraft.media._resampling: rows of bytes made longer or shorter, and fewer or more of them.
 *
 * resampling.py says what is weighed how and checks nothing here again; what could lead outside of
 * memory is checked here. Sums are of integers, so the order and the processor change nothing.
 * Only CPython's stable interface is used, so that one build serves 3.11 and newer.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>

/* Where the C library can choose, faster instructions are chosen as the module is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

enum { COLOURS = 3, BLOCK = 2048 };

typedef int32_t Four __attribute__((vector_size(16)));

/* For each new place: the first old one, how many, and their weights in 2^-precision. */
typedef struct {
    const int32_t *first;
    const int32_t *count;
    const int16_t *weights; /* [places, taps] */
    size_t places, taps;
    int precision;
} Rule;

static uint8_t to_byte(int32_t sum, int precision) {
    sum >>= precision;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

/* One row of pixels; `wide` has room for `size` of them. */
FAST static void resample_row(const uint8_t *row, size_t size, Four *wide, uint8_t *made, Rule rule) {
    for (size_t i = 0; i < size; ++i)
        wide[i] = (Four){row[COLOURS * i], row[COLOURS * i + 1], row[COLOURS * i + 2], 0};
    const int32_t half = 1 << (rule.precision - 1);
    for (size_t place = 0; place < rule.places; ++place) {
        const Four *from = wide + rule.first[place];
        const int16_t *weights = rule.weights + place * rule.taps;
        Four sum = {half, half, half, half};
        for (int32_t k = 0; k < rule.count[place]; ++k) {
            const int32_t weight = weights[k];
            sum += from[k] * (Four){weight, weight, weight, weight};
        }
        sum >>= rule.precision;
        sum &= sum > 0;
        sum |= sum > 255; /* all bits, of which the lowest eight are 255 */
        for (int colour = 0; colour < COLOURS; ++colour)
            made[COLOURS * place + colour] = (uint8_t)sum[colour];
    }
}

/* One new row out of old ones, some columns at a time. */
FAST static void mix_rows(const uint8_t *rows, size_t columns, size_t place, uint8_t *made, Rule rule) {
    const int16_t *weights = rule.weights + place * rule.taps;
    const uint8_t *first = rows + (size_t)rule.first[place] * columns;
    int32_t sums[BLOCK];
    for (size_t begin = 0; begin < columns; begin += BLOCK) {
        const size_t width = columns - begin < BLOCK ? columns - begin : BLOCK;
        for (size_t i = 0; i < width; ++i) sums[i] = 1 << (rule.precision - 1);
        for (int32_t k = 0; k < rule.count[place]; ++k) {
            const uint8_t *from = first + (size_t)k * columns + begin;
            const int32_t weight = weights[k];
            for (size_t i = 0; i < width; ++i) sums[i] += weight * from[i];
        }
        for (size_t i = 0; i < width; ++i) made[begin + i] = to_byte(sums[i], rule.precision);
    }
}

typedef struct {
    Py_buffer made, old, first, count, weights;
    Py_ssize_t rows, size; /* of the old ones: how many lines, and how long each is */
    Rule rule;
} Call;

static void release(Call *call) {
    Py_buffer *all[] = {&call->made, &call->old, &call->first, &call->count, &call->weights};
    for (size_t i = 0; i < sizeof all / sizeof *all; ++i) PyBuffer_Release(all[i]);
}

/* `lines` and `unit`: the bytes of an old place are lines * unit, and so are those of a new one. */
static int is_inside(const Call *call, Py_ssize_t unit) {
    const Rule *rule = &call->rule;
    const Py_ssize_t places = (Py_ssize_t)rule->places;
    if (call->rows < 0 || call->size < 1 || places < 1 || rule->taps < 1) return 0;
    if (rule->precision < 1 || rule->precision > 30) return 0;
    if (call->old.len / unit / call->size != call->rows || call->made.len / unit / places != call->rows)
        return 0;
    if (call->old.len != call->rows * call->size * unit) return 0;
    if (call->made.len != call->rows * places * unit) return 0;
    if (call->count.len != call->first.len || call->weights.len % (places * 2)) return 0;
    for (Py_ssize_t i = 0; i < places; ++i) {
        const int64_t first = rule->first[i], count = rule->count[i];
        if (first < 0 || count < 0 || count > (int64_t)rule->taps || first + count > call->size)
            return 0;
    }
    return 1;
}

/* (made, old, rows, size, first, count, weights, precision); 0 with a Python error. */
static int take(PyObject *given, Call *call, Py_ssize_t unit) {
    Rule *rule = &call->rule;
    if (!PyArg_ParseTuple(given, "w*y*nny*y*y*i", &call->made, &call->old, &call->rows, &call->size,
                          &call->first, &call->count, &call->weights, &rule->precision))
        return 0;
    rule->first = call->first.buf;
    rule->count = call->count.buf;
    rule->weights = call->weights.buf;
    rule->places = (size_t)call->first.len / sizeof(int32_t);
    rule->taps = rule->places ? (size_t)call->weights.len / sizeof(int16_t) / rule->places : 0;
    if (is_inside(call, unit)) return 1;
    release(call);
    PyErr_SetString(PyExc_ValueError, "sizes, places and weights do not fit each other");
    return 0;
}

static PyObject *py_across(PyObject *Py_UNUSED(self), PyObject *given) {
    Call call;
    if (!take(given, &call, COLOURS)) return NULL;
    const size_t size = (size_t)call.size, new_size = call.rule.places;
    Four *wide = malloc(size * sizeof *wide);
    if (wide == NULL) {
        release(&call);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS;
    for (size_t row = 0; row < (size_t)call.rows; ++row) {
        const uint8_t *old = (const uint8_t *)call.old.buf + row * size * COLOURS;
        resample_row(old, size, wide, (uint8_t *)call.made.buf + row * new_size * COLOURS, call.rule);
    }
    Py_END_ALLOW_THREADS;
    free(wide);
    release(&call);
    Py_RETURN_NONE;
}

static PyObject *py_down(PyObject *Py_UNUSED(self), PyObject *given) {
    Call call;
    if (!take(given, &call, 1)) return NULL;
    const size_t columns = (size_t)call.rows;
    Py_BEGIN_ALLOW_THREADS;
    for (size_t place = 0; place < call.rule.places; ++place)
        mix_rows(call.old.buf, columns, place, (uint8_t *)call.made.buf + place * columns, call.rule);
    Py_END_ALLOW_THREADS;
    release(&call);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"across", py_across, METH_VARARGS, "Rows of pixels in three colours, [rows, size, 3]."},
    {"down", py_down, METH_VARARGS, "Columns of bytes, [size, rows]."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_resampling", "Rows and columns of bytes, resampled.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__resampling(void) { return PyModule_Create(&module); }
