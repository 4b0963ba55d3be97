/* Records calls of native functions: the address that a call jumps to is swapped for a trampoline's, and swapped back.
 *
 * The function objects stay the same, so identity, pickle, and tables that are keyed by functions keep working. Every calling
 * convention of CPython passes at most five pointers, in registers on x86-64 and aarch64: one form of trampoline forwards any.
 * The library is never unloaded: a copy of a trampoline's address may outlive the swap. */
typedef PyObject *(*Native)(void *, void *, void *, void *, void *);
enum { MAX_CALLS = 4096 };

typedef struct {
    Native original;
    Native *slot;              /* where the address is */
    PyTypeObject *type;        /* NULL, or the slot is this type's, and calls of its instances jump there */
    unsigned long vectorcall;  /* the type's flag for calls that bypass the slot: taken away while it is swapped */
    PyObject *owner;           /* keeps the slot alive */
    uint32_t name;
    uint8_t category;
    int is_swapped;
} Call;

static Call calls[MAX_CALLS];
static int num_calls;

/* The calling thread's lane before a native call, NULL if the call is not recorded. */
static inline Lane *enter_native(Thread *t, uint64_t *window, uint32_t *depth) {
    if (__builtin_expect(is_off(), 0)) return NULL;
    Lane *lane = lane_of(t);
    *window = t->window, *depth = t->depth++;
    if (!lane) t->depth = *depth;
    return lane;
}

/* The window may have ended during the call, or the process may have forked: then the lane is gone. */
static inline void leave_native(Thread *t, Lane *lane, uint64_t window, uint32_t depth, int64_t start, uint32_t name,
                                uint8_t category) {
    int64_t end = now_ns();
    t->depth = depth; /* also where a call did not return, but was left */
    if (!is_off() && window == atomic_load_explicit(&window_number, memory_order_relaxed))
        put(lane, start, end, name, category, depth, 0);
}

static __attribute__((noinline)) PyObject *call_native(void *a, void *b, void *c, void *d, void *e, int index) {
    const Call *call = &calls[index];
    Thread *t = &self;
    uint64_t window;
    uint32_t depth;
    Lane *lane = enter_native(t, &window, &depth);
    if (!lane) return call->original(a, b, c, d, e);
    int64_t start = now_ns();
    PyObject *result = call->original(a, b, c, d, e);
    leave_native(t, lane, window, depth, start, call->name, call->category);
    return result;
}

/* One trampoline per definition: it knows only its own number. */
#define TRAMPOLINE(n) static PyObject *trampoline_##n(void *a, void *b, void *c, void *d, void *e) { return call_native(a, b, c, d, e, 0x##n); }
#define X16(M, p) M(p##0) M(p##1) M(p##2) M(p##3) M(p##4) M(p##5) M(p##6) M(p##7) M(p##8) M(p##9) M(p##a) M(p##b) M(p##c) M(p##d) M(p##e) M(p##f)
#define X256(M, p) X16(M, p##0) X16(M, p##1) X16(M, p##2) X16(M, p##3) X16(M, p##4) X16(M, p##5) X16(M, p##6) X16(M, p##7) X16(M, p##8) X16(M, p##9) X16(M, p##a) X16(M, p##b) X16(M, p##c) X16(M, p##d) X16(M, p##e) X16(M, p##f)
#define X4096(M) X256(M, 0) X256(M, 1) X256(M, 2) X256(M, 3) X256(M, 4) X256(M, 5) X256(M, 6) X256(M, 7) X256(M, 8) X256(M, 9) X256(M, a) X256(M, b) X256(M, c) X256(M, d) X256(M, e) X256(M, f)
#define ADDRESS(n) trampoline_##n,
X4096(TRAMPOLINE)
static const Native trampolines[MAX_CALLS] = {X4096(ADDRESS)};

/* Cython's function type is no subtype of PyCFunction, but up to 3.0 its objects begin as one. */
static int is_cython_function(PyObject *function) {
    PyTypeObject *type = Py_TYPE(function);
    return strncmp(type->tp_name, "_cython_3_0_", 12) == 0 && strstr(type->tp_name, ".cython_function_or_method") != NULL;
}

static PyMethodDef *definition_of(PyObject *function) {
    if (PyInstanceMethod_Check(function)) function = PyInstanceMethod_GET_FUNCTION(function);
    if (PyObject_TypeCheck(function, &PyCFunction_Type) || is_cython_function(function))
        return ((PyCFunctionObject *)function)->m_ml;
    if (Py_TYPE(function) == &PyMethodDescr_Type || Py_TYPE(function) == &PyClassMethodDescr_Type)
        return ((PyMethodDescrObject *)function)->d_method;
    return NULL;
}

static int is_nanobind_function(PyObject *function) {
    PyTypeObject *type = Py_TYPE(function);
    int has_name = !strcmp(type->tp_name, "nanobind.nb_func") || !strcmp(type->tp_name, "nanobind.nb_method");
    return has_name && PyType_HasFeature(type, Py_TPFLAGS_HAVE_VECTORCALL);
}

/* Where the address is that a call jumps to: in the function's definition, in the object itself as nanobind's functions have
 * it, or, for a type, in the slot for calls of its instances. NULL: nowhere, or in a definition of `__new__`, which all types
 * share. */
static Native *slot_of(PyObject *function) {
    PyMethodDef *definition = definition_of(function);
    if (definition && definition->ml_name && strcmp(definition->ml_name, "__new__") == 0) return NULL;
    if (definition) return (Native *)(void *)&definition->ml_meth;
    if (is_nanobind_function(function)) return (Native *)(void *)((char *)function + Py_TYPE(function)->tp_vectorcall_offset);
    if (PyType_Check(function)) return (Native *)(void *)&((PyTypeObject *)function)->tp_call;
    return NULL;
}

/* Slots may lie in data that is read-only after relocation. */
static int make_writable(void *address, size_t bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)address / page * page;
    return mprotect((void *)begin, (uintptr_t)address + bytes - begin, PROT_READ | PROT_WRITE) == 0;
}

static Call *call_of(const Native *slot) {
    for (int i = 0; i < num_calls; i++)
        if (calls[i].slot == slot) return &calls[i];
    return NULL;
}

/* Put the trampoline in or out, unless another tool has put its own function there since. */
static void point(Call *call, int to_trampoline) {
    Native trampoline = trampolines[call - calls];
    if (*call->slot != (to_trampoline ? call->original : trampoline)) return;
    *call->slot = to_trampoline ? trampoline : call->original;
    if (!call->type) return;
    if (to_trampoline) call->type->tp_flags &= ~call->vectorcall;
    else call->type->tp_flags |= call->vectorcall;
}

/* swap(function, name, category): 1 if its calls are recorded from now on, or for a type its instances'; 0 if they were
 * already, or cannot be; -1 if there are MAX_CALLS others. */
static PyObject *py_swap(PyObject *module, PyObject *arguments) {
    PyObject *function;
    unsigned name;
    int category;
    if (!PyArg_ParseTuple(arguments, "OIi", &function, &name, &category)) return NULL;
    Native *slot = slot_of(function);
    if (!slot || !*slot) return PyLong_FromLong(0);
    Call *call = call_of(slot);
    if (!call) {
        if (num_calls == MAX_CALLS) return PyLong_FromLong(-1);
        call = &calls[num_calls];
        PyTypeObject *type = PyType_Check(function) ? (PyTypeObject *)function : NULL;
        *call = (Call){*slot, slot, type, type ? type->tp_flags & Py_TPFLAGS_HAVE_VECTORCALL : 0, Py_NewRef(function)};
        num_calls++;
    }
    /* Another tool's function there may call the trampoline: to swap it again would be a recursion without end. */
    if (call->is_swapped || *slot != call->original) return PyLong_FromLong(0);
    if (!make_writable(slot, sizeof *slot)) return PyLong_FromLong(0);
    call->name = name, call->category = (uint8_t)category, call->is_swapped = 1;
    point(call, 1);
    return PyLong_FromLong(1);
}

/* object[key] is a slot of the type, of which each subclass has a copy. One family of types at a time: a tensor's. */
static binaryfunc get_item;
static objobjargproc set_item;
static uint32_t get_item_name, set_item_name;
static uint8_t item_category;

static PyObject *recorded_get_item(PyObject *object, PyObject *key) {
    Thread *t = &self;
    uint64_t window;
    uint32_t depth;
    Lane *lane = enter_native(t, &window, &depth);
    if (!lane) return get_item(object, key);
    int64_t start = now_ns();
    PyObject *result = get_item(object, key);
    leave_native(t, lane, window, depth, start, get_item_name, item_category);
    return result;
}

static int recorded_set_item(PyObject *object, PyObject *key, PyObject *value) {
    Thread *t = &self;
    uint64_t window;
    uint32_t depth;
    Lane *lane = enter_native(t, &window, &depth);
    if (!lane) return set_item(object, key, value);
    int64_t start = now_ns();
    int result = set_item(object, key, value);
    leave_native(t, lane, window, depth, start, set_item_name, item_category);
    return result;
}

/* swap_items(type, name of get, name of set, category): for the first type of the family, then its subclasses. */
static PyObject *py_swap_items(PyObject *module, PyObject *arguments) {
    PyTypeObject *type;
    unsigned get_name, set_name;
    int category;
    if (!PyArg_ParseTuple(arguments, "O!IIi", &PyType_Type, &type, &get_name, &set_name, &category)) return NULL;
    PyMappingMethods *slots = type->tp_as_mapping;
    if (!slots || !slots->mp_subscript || !slots->mp_ass_subscript) Py_RETURN_FALSE;
    if (!get_item) get_item = slots->mp_subscript, set_item = slots->mp_ass_subscript;
    if (!make_writable(slots, sizeof *slots)) Py_RETURN_FALSE;
    get_item_name = get_name, set_item_name = set_name, item_category = (uint8_t)category;
    if (slots->mp_subscript == get_item) slots->mp_subscript = recorded_get_item;
    if (slots->mp_ass_subscript == set_item) slots->mp_ass_subscript = recorded_set_item;
    return PyBool_FromLong(slots->mp_subscript == recorded_get_item);
}

static PyObject *py_restore_items(PyObject *module, PyObject *type) {
    PyMappingMethods *slots = PyType_Check(type) ? ((PyTypeObject *)type)->tp_as_mapping : NULL;
    if (slots && slots->mp_subscript == recorded_get_item) slots->mp_subscript = get_item;
    if (slots && slots->mp_ass_subscript == recorded_set_item) slots->mp_ass_subscript = set_item;
    Py_RETURN_NONE;
}

/* ctypes: the call slot of its function types. Every library's functions go through it, so whose call it is depends on the
 * module that calls. */
static ternaryfunc ctypes_call;
static PyObject *caller_categories, *symbol_names, *module_name;

/* mapping[key] as a number; -1 on any error. */
static long number_for(PyObject *mapping, PyObject *key) {
    PyObject *found = key ? PyObject_GetItem(mapping, key) : NULL;
    long number = found ? PyLong_AsLong(found) : -1;
    Py_XDECREF(found);
    PyErr_Clear();
    return number;
}

/* The number of a function's symbol; functions at an address have none, and have types of another name. */
static long symbol_of(PyObject *function) {
    PyObject *symbol = NULL;
    if (strcmp(Py_TYPE(function)->tp_name, "_FuncPtr") == 0) symbol = PyObject_GetAttrString(function, "__name__");
    long name = number_for(symbol_names, symbol ? symbol : Py_None);
    Py_XDECREF(symbol);
    return name;
}

static PyObject *recorded_ctypes_call(PyObject *function, PyObject *arguments, PyObject *keywords) {
    Thread *t = &self;
    uint64_t window;
    uint32_t depth;
    PyObject *globals = is_off() ? NULL : PyEval_GetGlobals();
    long category = globals ? number_for(caller_categories, PyDict_GetItemWithError(globals, module_name)) : -1;
    long name = category < 0 ? -1 : symbol_of(function);
    Lane *lane = name < 0 ? NULL : enter_native(t, &window, &depth);
    if (!lane) return ctypes_call(function, arguments, keywords);
    int64_t start = now_ns();
    PyObject *result = ctypes_call(function, arguments, keywords);
    leave_native(t, lane, window, depth, start, (uint32_t)name, (uint8_t)category);
    return result;
}

/* Subclasses to come take the slot from the base's wrapper of it. */
static void point_ctypes(PyTypeObject *type, ternaryfunc from, ternaryfunc to) {
    PyObject *wrapper = PyDict_GetItemString(type->tp_dict, "__call__");
    if (wrapper && Py_IS_TYPE(wrapper, &PyWrapperDescr_Type)) {
        PyWrapperDescrObject *of_slot = (PyWrapperDescrObject *)wrapper;
        if (of_slot->d_wrapped == (void *)from) of_slot->d_wrapped = (void *)to;
    }
    if (type->tp_call == from) type->tp_call = to;
}

/* swap_ctypes(type, categories, names): for the base of all function types, then its subclasses. categories maps the name of a
 * calling module to a category, or -1 if its calls are not recorded; names maps symbols, and None, to numbers of names. */
static PyObject *py_swap_ctypes(PyObject *module, PyObject *arguments) {
    PyTypeObject *type;
    PyObject *categories, *names;
    if (!PyArg_ParseTuple(arguments, "O!OO", &PyType_Type, &type, &categories, &names)) return NULL;
    if (!module_name && !(module_name = PyUnicode_InternFromString("__name__"))) return NULL;
    Py_XSETREF(caller_categories, Py_NewRef(categories));
    Py_XSETREF(symbol_names, Py_NewRef(names));
    if (!ctypes_call) ctypes_call = type->tp_call;
    point_ctypes(type, ctypes_call, recorded_ctypes_call);
    Py_RETURN_NONE;
}

static PyObject *py_restore_ctypes(PyObject *module, PyObject *type) {
    if (PyType_Check(type)) point_ctypes((PyTypeObject *)type, recorded_ctypes_call, ctypes_call);
    Py_RETURN_NONE;
}

/* restore(): swap all back, unless somebody else has changed one since. */
static PyObject *py_restore(PyObject *module, PyObject *ignored) {
    for (int i = 0; i < num_calls; i++) {
        if (calls[i].is_swapped) point(&calls[i], 0);
        calls[i].is_swapped = 0;
    }
    Py_RETURN_NONE;
}

/* switch_calls(on): put the trampolines of all that is swapped in or out, without forgetting them. */
static PyObject *py_switch_calls(PyObject *module, PyObject *flag) {
    int on = PyObject_IsTrue(flag);
    for (int i = 0; i < num_calls; i++)
        if (calls[i].is_swapped) point(&calls[i], on);
    Py_RETURN_NONE;
}

#define INTERCEPTION_METHODS                                                                                      \
    {"swap", py_swap, METH_VARARGS, NULL}, {"swap_items", py_swap_items, METH_VARARGS, NULL},                     \
    {"swap_ctypes", py_swap_ctypes, METH_VARARGS, NULL}, {"restore_ctypes", py_restore_ctypes, METH_O, NULL},     \
    {"switch_calls", py_switch_calls, METH_O, NULL}, {"restore", py_restore, METH_NOARGS, NULL}, {"restore_items", py_restore_items, METH_O, NULL}
