/* Records calls of native functions: PyMethodDef.ml_meth is swapped for a trampoline, and swapped back.
 *
 * The function objects stay the same, so identity, pickle, and tables that are keyed by functions keep working. Every calling
 * convention of CPython passes at most five pointers, in registers on x86-64 and aarch64: one form of trampoline forwards any.
 * The library is never unloaded: a copy of a trampoline's address may outlive the swap. */
typedef PyObject *(*Native)(void *, void *, void *, void *, void *);
enum { MAX_CALLS = 4096 };

typedef struct {
    Native original;
    PyMethodDef *definition;
    PyObject *owner; /* keeps the definition alive */
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

/* Tables of definitions may lie in data that is read-only after relocation. */
static int make_writable(void *address, size_t bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)address / page * page;
    return mprotect((void *)begin, (uintptr_t)address + bytes - begin, PROT_READ | PROT_WRITE) == 0;
}

static Call *call_of(const PyMethodDef *definition) {
    for (int i = 0; i < num_calls; i++)
        if (calls[i].definition == definition) return &calls[i];
    return NULL;
}

/* swap(function, name, category): 1 if its calls are recorded from now on; 0 if they were already, or cannot be: it is no
 * native function, or one of `__new__`, which has one definition for all types; -1 if there are MAX_CALLS others. */
static PyObject *py_swap(PyObject *module, PyObject *arguments) {
    PyObject *function;
    unsigned name;
    int category;
    if (!PyArg_ParseTuple(arguments, "OIi", &function, &name, &category)) return NULL;
    PyMethodDef *definition = definition_of(function);
    if (!definition || !definition->ml_meth || (definition->ml_name && strcmp(definition->ml_name, "__new__") == 0))
        return PyLong_FromLong(0);
    Call *call = call_of(definition);
    if (!call) {
        if (num_calls == MAX_CALLS) return PyLong_FromLong(-1);
        call = &calls[num_calls];
        *call = (Call){(Native)(void *)definition->ml_meth, definition, Py_NewRef(function)};
        num_calls++;
    }
    /* Another tool's function there may call the trampoline: to swap it again would be a recursion without end. */
    if (call->is_swapped || definition->ml_meth != (PyCFunction)(void *)call->original) return PyLong_FromLong(0);
    if (!make_writable(definition, sizeof *definition)) return PyLong_FromLong(0);
    call->name = name, call->category = (uint8_t)category, call->is_swapped = 1;
    definition->ml_meth = (PyCFunction)(void *)trampolines[call - calls];
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

/* restore(): swap all definitions back, unless somebody else has changed one since. */
static PyObject *py_restore(PyObject *module, PyObject *ignored) {
    for (int i = 0; i < num_calls; i++) {
        if (calls[i].is_swapped && calls[i].definition->ml_meth == (PyCFunction)(void *)trampolines[i])
            calls[i].definition->ml_meth = (PyCFunction)(void *)calls[i].original;
        calls[i].is_swapped = 0;
    }
    Py_RETURN_NONE;
}

/* switch_calls(on): put the trampolines of all swapped definitions in or out, without forgetting them. */
static PyObject *py_switch_calls(PyObject *module, PyObject *flag) {
    int on = PyObject_IsTrue(flag);
    for (int i = 0; i < num_calls; i++) {
        PyCFunction original = (PyCFunction)(void *)calls[i].original, trampoline = (PyCFunction)(void *)trampolines[i];
        if (calls[i].is_swapped && calls[i].definition->ml_meth == (on ? original : trampoline))
            calls[i].definition->ml_meth = on ? trampoline : original;
    }
    Py_RETURN_NONE;
}

#define INTERCEPTION_METHODS                                                                                      \
    {"swap", py_swap, METH_VARARGS, NULL}, {"swap_items", py_swap_items, METH_VARARGS, NULL},                     \
    {"switch_calls", py_switch_calls, METH_O, NULL}, {"restore", py_restore, METH_NOARGS, NULL}, {"restore_items", py_restore_items, METH_O, NULL}
