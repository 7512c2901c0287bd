/* flashdraft.kernels.cpu._processor: which levels of the kernels this processor runs.
 *
 * Compiled for every machine of the architecture, unlike the kernels: levels.py asks it before it
 * loads any of them.
 */
#include <Python.h>

#include "detect.h"

static PyObject *runnable(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    Level levels[MOST_LEVELS];
    const size_t count = find_levels(levels);
    PyObject *names = PyList_New(0);
    for (size_t i = 0; names && i < count; i++) {
        if (!levels[i].runs) continue;
        PyObject *name = PyUnicode_FromString(levels[i].name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyMethodDef methods[] = {
    {"runnable", runnable, METH_NOARGS, "Names of levels, the slowest first."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_processor",
    .m_doc = "Which levels of the kernels this processor runs.",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__processor(void) { return PyModule_Create(&module); }
