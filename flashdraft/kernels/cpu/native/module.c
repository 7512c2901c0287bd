/* flashdraft.kernels.cpu._native_LEVEL: the kernels as Python functions of addresses and sizes.
 *
 * setup.py compiles this folder once for each level and names the module in MODULE; levels.py
 * chooses. Only CPython's stable interface is used, so that one build serves 3.11 and newer.
 * The caller (cpu/backend.py) owns all memory and has checked shapes, dtypes and layout. What only
 * the data can tell (positions, slots, pages) is checked by the kernels and raised here.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

#define QUOTED_NAME(name) #name
#define QUOTED(name) QUOTED_NAME(name)
#define INIT_NAME(name) PyInit_##name
#define INIT(name) INIT_NAME(name)

/* The arguments of one call, taken in order; a wrong one sets the Python error and yields 0. */
typedef struct {
    PyObject *const *next;
} Arguments;

static void *take_address(Arguments *arguments) {
    return PyLong_AsVoidPtr(*arguments->next++);
}

static size_t take_size(Arguments *arguments) { return PyLong_AsSize_t(*arguments->next++); }

static float take_float(Arguments *arguments) {
    return (float)PyFloat_AsDouble(*arguments->next++);
}

static int take_int(Arguments *arguments) { return (int)PyLong_AsLong(*arguments->next++); }

static int has_count(Py_ssize_t count, Py_ssize_t expected) {
    if (count == expected) return 1;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
    return 0;
}

static PyObject *result(Status status) {
    switch (status) {
    case DONE: Py_RETURN_NONE;
    case NO_MEMORY: return PyErr_NoMemory();
    case BAD_POSITION:
        PyErr_SetString(PyExc_IndexError, "a position lies outside the RoPE table");
        return NULL;
    case BAD_SLOT:
        PyErr_SetString(PyExc_IndexError, "a slot lies outside the key/value cache");
        return NULL;
    case BAD_VIEW:
        PyErr_SetString(PyExc_ValueError,
                        "query_start, context_lens, block_table and ahead do not fit the query rows");
        return NULL;
    case BAD_PAGE:
        PyErr_SetString(PyExc_IndexError, "the block table names a page outside the cache");
        return NULL;
    }
    Py_UNREACHABLE();
}

#define PARAMETERS PyObject *Py_UNUSED(self), PyObject *const *given, Py_ssize_t count

static PyObject *py_linear_float(PARAMETERS) {
    if (!has_count(count, 7)) return NULL;
    Arguments arguments = {given};
    LinearFloat call;
    call.x = take_address(&arguments);
    call.y = take_address(&arguments);
    call.rows = take_size(&arguments);
    call.threads = take_int(&arguments);
    call.panels = take_address(&arguments);
    call.in = take_size(&arguments);
    call.out = take_size(&arguments);
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    linear_float(&call);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_linear_int8(PARAMETERS) {
    if (!has_count(count, 9)) return NULL;
    Arguments arguments = {given};
    LinearInt8 call;
    call.x = take_address(&arguments);
    call.y = take_address(&arguments);
    call.rows = take_size(&arguments);
    call.threads = take_int(&arguments);
    call.panels = take_address(&arguments);
    call.scale = take_address(&arguments);
    call.start = take_address(&arguments);
    call.in = take_size(&arguments);
    call.out = take_size(&arguments);
    if (PyErr_Occurred()) return NULL;
    Status status;
    Py_BEGIN_ALLOW_THREADS;
    status = linear_int8(&call);
    Py_END_ALLOW_THREADS;
    return result(status);
}

static PyObject *run_rows(void (*operation)(const Rows *), const Rows *call) {
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    operation(call);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_rms_norm(PARAMETERS) {
    if (!has_count(count, 7)) return NULL;
    Arguments arguments = {given};
    Rows call = {0};
    call.x = take_address(&arguments);
    call.weight = take_address(&arguments);
    call.out = take_address(&arguments);
    call.rows = take_size(&arguments);
    call.columns = take_size(&arguments);
    call.eps = take_float(&arguments);
    call.threads = take_int(&arguments);
    return run_rows(rms_norm, &call);
}

static PyObject *py_add_rms_norm(PARAMETERS) {
    if (!has_count(count, 9)) return NULL;
    Arguments arguments = {given};
    Rows call = {0};
    call.x = take_address(&arguments);
    call.delta = take_address(&arguments);
    call.weight = take_address(&arguments);
    call.total = take_address(&arguments);
    call.out = take_address(&arguments);
    call.rows = take_size(&arguments);
    call.columns = take_size(&arguments);
    call.eps = take_float(&arguments);
    call.threads = take_int(&arguments);
    return run_rows(add_rms_norm, &call);
}

static PyObject *py_gated(PARAMETERS) {
    if (!has_count(count, 6)) return NULL;
    Arguments arguments = {given};
    Rows call = {0};
    call.x = take_address(&arguments);
    call.out = take_address(&arguments);
    call.rows = take_size(&arguments);
    call.columns = take_size(&arguments);
    call.kind = take_int(&arguments) ? GELU_TANH : SILU;
    call.threads = take_int(&arguments);
    return run_rows(gated, &call);
}

static PyObject *py_softmax(PARAMETERS) {
    if (!has_count(count, 5)) return NULL;
    Arguments arguments = {given};
    Rows call = {0};
    call.x = take_address(&arguments);
    call.out = take_address(&arguments);
    call.rows = take_size(&arguments);
    call.columns = take_size(&arguments);
    call.threads = take_int(&arguments);
    return run_rows(softmax, &call);
}

static PyObject *py_softcap(PARAMETERS) {
    if (!has_count(count, 6)) return NULL;
    Arguments arguments = {given};
    Rows call = {0};
    call.x = take_address(&arguments);
    call.out = take_address(&arguments);
    call.rows = take_size(&arguments);
    call.columns = take_size(&arguments);
    call.cap = take_float(&arguments);
    call.threads = take_int(&arguments);
    return run_rows(softcap, &call);
}

static PyObject *py_rotate_rows(PARAMETERS) {
    if (!has_count(count, 5)) return NULL;
    Arguments arguments = {given};
    Rows call = {0};
    call.x = take_address(&arguments);
    call.out = take_address(&arguments);
    call.rows = take_size(&arguments);
    call.columns = take_size(&arguments);
    call.threads = take_int(&arguments);
    return run_rows(rotate_rows, &call);
}

static PyObject *py_argmax(PARAMETERS) {
    if (!has_count(count, 5)) return NULL;
    Arguments arguments = {given};
    Rows call = {0};
    call.x = take_address(&arguments);
    call.index = take_address(&arguments);
    call.rows = take_size(&arguments);
    call.columns = take_size(&arguments);
    call.threads = take_int(&arguments);
    return run_rows(argmax, &call);
}

static PyObject *py_prepare_qkv(PARAMETERS) {
    if (!has_count(count, 20)) return NULL;
    Arguments arguments = {given};
    PrepareQKV call;
    call.qkv = take_address(&arguments);
    call.position = take_address(&arguments);
    call.slot = take_address(&arguments);
    call.key_cache = take_address(&arguments);
    call.value_cache = take_address(&arguments);
    call.query = take_address(&arguments);
    call.rows = take_size(&arguments);
    call.num_slots = take_size(&arguments);
    call.threads = take_int(&arguments);
    call.cos = take_address(&arguments);
    call.sin = take_address(&arguments);
    call.num_positions = take_size(&arguments);
    call.q_norm = take_address(&arguments);
    call.k_norm = take_address(&arguments);
    call.heads = take_size(&arguments);
    call.kv_heads = take_size(&arguments);
    call.head_dim = take_size(&arguments);
    call.norm_values = take_int(&arguments);
    call.share_kv = take_int(&arguments);
    call.eps = take_float(&arguments);
    if (PyErr_Occurred()) return NULL;
    Status status;
    Py_BEGIN_ALLOW_THREADS;
    status = prepare_qkv(&call);
    Py_END_ALLOW_THREADS;
    return result(status);
}

static PyObject *py_attention(PARAMETERS) {
    if (!has_count(count, 22)) return NULL;
    Arguments arguments = {given};
    Attention call;
    call.query = take_address(&arguments);
    call.keys = take_address(&arguments);
    call.values = take_address(&arguments);
    call.out = take_address(&arguments);
    call.rows = take_size(&arguments);
    call.heads = take_size(&arguments);
    call.kv_heads = take_size(&arguments);
    call.head_dim = take_size(&arguments);
    call.pages = take_size(&arguments);
    call.ancestors = take_address(&arguments);
    call.depths = take_address(&arguments);
    call.ahead = take_address(&arguments);
    call.scale = take_float(&arguments);
    call.window = take_size(&arguments);
    call.causal = take_int(&arguments);
    call.threads = take_int(&arguments);
    call.query_start = take_address(&arguments);
    call.context_lens = take_address(&arguments);
    call.block_table = take_address(&arguments);
    call.sequences = take_size(&arguments);
    call.table_width = take_size(&arguments);
    call.page_size = take_size(&arguments);
    if (PyErr_Occurred()) return NULL;
    Status status;
    Py_BEGIN_ALLOW_THREADS;
    status = attention(&call);
    Py_END_ALLOW_THREADS;
    return result(status);
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    METHOD(linear_float), METHOD(linear_int8), METHOD(rms_norm),    METHOD(add_rms_norm),
    METHOD(gated),        METHOD(softmax),     METHOD(softcap),     METHOD(argmax),
    METHOD(prepare_qkv),  METHOD(attention),   METHOD(rotate_rows), {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = QUOTED(MODULE),
    .m_doc = "Kernels for the CPU; flashdraft.kernels.cpu.backend is their Python face.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC INIT(MODULE)(void) {
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    if (PyModule_AddIntMacro(made, PANEL) < 0 ||
        PyModule_AddIntConstant(made, "GROUP", int8_group) < 0)
        Py_CLEAR(made);
    return made;
}
