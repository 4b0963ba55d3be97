/* The module object. It is made here and not by the import system: the library is loaded by collectives/compiler.py. */
static PyMethodDef module_methods[] = {RECORDER_METHODS, INTERCEPTION_METHODS, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "rayagi.profiler.native", NULL, -1, module_methods};

PyObject *make_module(void) {
    int failed = initialize_recorder();
    if (failed) return errno = failed, PyErr_SetFromErrno(PyExc_OSError);
    return PyModule_Create(&module_definition);
}
