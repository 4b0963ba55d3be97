/* Records events into one mapped file per thread. Its layout is that of layout.py.
 *
 * A window is the time between start() and stop(). Each thread makes a file, its lane, when it records its first event of a
 * window. Only the owner writes records to a lane. No descriptor stays open: a program may close or reuse any number.
 * What is stored in a shared mapping belongs to the kernel at once, so it survives the process's death by any signal. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { OFF, WARM_UP, RECORD };   /* WARM_UP: does all work of recording, but commits nothing */
enum { PROCESS, THREAD };        /* categories that the recorder itself records */
enum { FROM_PYTHON = 1 };       /* flags of events that Python code records */
enum { FIRST_SEGMENT = 4096, MAX_SEGMENT = 65536, MAX_DEPTH = 255 };

typedef struct {
    int64_t start, end; /* end 0: still open */
    uint32_t name;
    uint8_t category, depth;
    uint16_t flags;
} Record;

typedef struct {
    char magic[8];
    uint32_t version, record_size;
    uint64_t thread, capacity;
    _Atomic uint64_t committed; /* stored with release after the record: a reader that sees the count sees the record */
    _Atomic uint64_t dropped;
    int64_t start;
    int64_t dropped_from; /* start of the first event that was dropped, 0 if none was */
} Header;

typedef struct Lane {
    Header *header; /* a mapping of its own, as long as the lane */
    void *mapped;   /* the pages of the window, which is moved on when it is full */
    size_t mapped_bytes;
    Record *window;       /* record number `first` */
    uint64_t first, used; /* used: records committed */
    uint64_t room;        /* records that have space on the disk; all of [first, room) is mapped */
    uint64_t dropped;
    int is_full; /* no space was left: nothing more of this window is recorded, and no event pays for another try */
    uint64_t window_number, session;
    char *path;
    struct Lane *next;
} Lane;

typedef struct {
    uint32_t name;
    uint16_t flags;
    uint8_t category;
    int64_t index; /* of its record in the lane, -1 if there is none */
} Scope;

typedef struct {
    Lane *lane;          /* NULL if it could not be made */
    uint64_t window;     /* for which `lane` is */
    uint64_t session;    /* in which `scopes` were opened */
    Scope *scopes;       /* open ones, the outermost first */
    uint32_t num_scopes, room_scopes;
    uint32_t depth;      /* native calls that are running */
    int has_destructor;
} Thread;

static __thread Thread self;
static _Atomic int mode = OFF;
static _Atomic uint64_t window_number, session_number;
static _Atomic int64_t window_start;
static _Atomic int64_t bytes_left; /* on disk, for all lanes of the process */
static _Atomic uint64_t lost;      /* events of threads that could not make a lane */
static _Atomic uint32_t num_lanes;
static char folder[3072];
static char *process_path;    /* of the lane with the process's record, */
static int64_t process_index; /* -1 if there is none, */
static Lane *lanes;                                             /* of all threads */
static pthread_mutex_t lanes_lock = PTHREAD_MUTEX_INITIALIZER;  /* of `lanes`, and of every lane's mapping */
static pthread_key_t at_thread_exit;

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* ---- lanes ---- */

static int reserve(size_t bytes) {
    if (atomic_fetch_sub(&bytes_left, (int64_t)bytes) >= (int64_t)bytes) return 1;
    atomic_fetch_add(&bytes_left, (int64_t)bytes);
    return 0;
}

static size_t offset_of(uint64_t index) { return sizeof(Header) + index * sizeof(Record); }

/* Map the next segment. Its disk space is allocated first: a store to a page without space would be a SIGBUS. */
static int grow(Lane *lane) {
    uint64_t count = lane->room < FIRST_SEGMENT ? FIRST_SEGMENT : lane->room > MAX_SEGMENT ? MAX_SEGMENT : lane->room;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = count * sizeof(Record);
    size_t begin = offset_of(lane->used) / page * page, end = offset_of(lane->used + count);
    if (!reserve(bytes)) return 0;
    int file = open(lane->path, O_RDWR | O_CLOEXEC);
    void *mapped = MAP_FAILED;
    if (file >= 0) {
        if (!posix_fallocate(file, (off_t)begin, (off_t)(end - begin)))
            mapped = mmap(NULL, end - begin, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, (off_t)begin);
        close(file);
    }
    if (mapped == MAP_FAILED) {
        atomic_fetch_add(&bytes_left, (int64_t)bytes);
        return 0;
    }
    if (lane->mapped) munmap(lane->mapped, lane->mapped_bytes);
    lane->mapped = mapped, lane->mapped_bytes = end - begin;
    lane->window = (Record *)((char *)mapped + offset_of(lane->used) - begin);
    lane->first = lane->used, lane->room = lane->used + count;
    return 1;
}

static int grow_locked(Lane *lane) {
    pthread_mutex_lock(&lanes_lock);
    int saved = errno, grown = grow(lane);
    errno = saved; /* an intercepted function may have set it for its caller */
    pthread_mutex_unlock(&lanes_lock);
    return grown;
}

/* The place of the next record, of an event that began at `start`; NULL, and counted, if there is no space. */
static inline Record *next_record(Lane *lane, int64_t start) {
    if (__builtin_expect(lane->used == lane->room, 0) && (lane->is_full || !grow_locked(lane))) {
        if (!lane->is_full) lane->is_full = 1, lane->header->dropped_from = start;
        atomic_store_explicit(&lane->header->dropped, ++lane->dropped, memory_order_relaxed);
        return NULL;
    }
    return &lane->window[lane->used - lane->first];
}

/* Returns the record's index, -1 if it was not kept. */
static inline int64_t put(Lane *lane, int64_t start, int64_t end, uint32_t name, uint8_t category, uint32_t depth,
                          uint16_t flags) {
    Record *record = next_record(lane, start);
    if (!record) return -1;
    *record = (Record){start, end, name, category, depth > MAX_DEPTH ? MAX_DEPTH : depth, flags};
    if (atomic_load_explicit(&mode, memory_order_relaxed) != RECORD) return -1;
    atomic_store_explicit(&lane->header->committed, ++lane->used, memory_order_release);
    return (int64_t)lane->used - 1;
}

static void complete_in_file(const char *path, int64_t index, int64_t end) {
    int saved = errno, file = open(path, O_WRONLY | O_CLOEXEC);
    if (file >= 0) {
        ssize_t written = pwrite(file, &end, sizeof end, (off_t)(offset_of(index) + offsetof(Record, end)));
        (void)written; /* without it the record stays open: readers bound it by its thread */
        close(file);
    }
    errno = saved;
}

/* Write the end of a record that was put while it was open; through the file if the window has moved on. */
static void complete(Lane *lane, int64_t index, int64_t end) {
    if (index >= (int64_t)lane->first)
        __atomic_store_n(&lane->window[index - lane->first].end, end, __ATOMIC_RELAXED);
    else if (index >= 0)
        complete_in_file(lane->path, index, end);
}

/* A lane of a window that warmed up has no records. */
static void delete_if_empty(Lane *lane) {
    if (lane->used || lane->dropped || !lane->header || lane->session != atomic_load(&session_number)) return;
    if (!unlink(lane->path)) atomic_fetch_add(&bytes_left, (int64_t)(lane->room * sizeof(Record)));
}

static void free_lane(Lane *lane) {
    if (lane->mapped) munmap(lane->mapped, lane->mapped_bytes);
    if (lane->header) munmap(lane->header, sizeof(Header));
    free(lane->path);
    free(lane);
}

/* Give back the space that no record took. The thread that puts records into the lane calls it, or has ended. */
static void cut_off(Lane *lane) {
    if (lane->mapped) munmap(lane->mapped, lane->mapped_bytes), lane->mapped = NULL;
    if (lane->used && lane->session == atomic_load(&session_number) && !truncate(lane->path, (off_t)offset_of(lane->used)))
        atomic_fetch_add(&bytes_left, (int64_t)((lane->room - lane->used) * sizeof(Record)));
}

/* End the lane's thread record, unless stop() has, and forget the lane. */
static void release_lane(Lane *lane, int64_t end) {
    pthread_mutex_lock(&lanes_lock);
    for (Lane **each = &lanes; *each; each = &(*each)->next)
        if (*each == lane) {
            if (end && lane->used) complete(lane, 0, end);
            *each = lane->next;
            delete_if_empty(lane);
            cut_off(lane);
            free_lane(lane);
            break;
        }
    pthread_mutex_unlock(&lanes_lock);
}

static Lane *make_lane(int64_t start) {
    Lane *lane = calloc(1, sizeof *lane);
    long thread = syscall(SYS_gettid);
    if (!lane) return NULL;
    if (asprintf(&lane->path, "%s/%ld-%u.events", folder, thread, atomic_fetch_add(&num_lanes, 1)) < 0) {
        free(lane);
        return NULL;
    }
    int file = open(lane->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    void *header = MAP_FAILED;
    if (file >= 0) {
        if (!posix_fallocate(file, 0, sizeof(Header)))
            header = mmap(NULL, sizeof(Header), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    }
    if (header == MAP_FAILED || (lane->header = header, !grow(lane))) {
        free_lane(lane);
        return NULL;
    }
    uint64_t capacity = lane->room + (uint64_t)(atomic_load(&bytes_left) > 0 ? atomic_load(&bytes_left) : 0) / sizeof(Record);
    *lane->header = (Header){"", 1, sizeof(Record), (uint64_t)thread, capacity, 0, 0, start, 0};
    memcpy(lane->header->magic, "RAYAGIEV", 8);
    lane->window_number = atomic_load(&window_number), lane->session = atomic_load(&session_number);
    return lane;
}

static void release_at_exit(Thread *t) {
    if (!t->has_destructor) pthread_setspecific(at_thread_exit, t), t->has_destructor = 1;
}

/* The calling thread's first event of a window: make its lane, record the thread and the scopes that are already open. */
static __attribute__((noinline)) Lane *open_lane(Thread *t, uint64_t window, int64_t start) {
    int saved = errno;
    if (t->lane) release_lane(t->lane, 0); /* of an earlier window, which stop() has ended */
    pthread_mutex_lock(&lanes_lock);
    Lane *lane = make_lane(start);
    if (lane) lane->next = lanes, lanes = lane;
    pthread_mutex_unlock(&lanes_lock);
    t->lane = lane, t->window = window;
    release_at_exit(t);
    if (lane) {
        put(lane, start, 0, 0, THREAD, 0, 0);
        for (uint32_t i = 0; i < t->num_scopes; i++) {
            Scope *scope = &t->scopes[i];
            scope->index = put(lane, start, 0, scope->name, scope->category, i, scope->flags);
        }
    }
    errno = saved;
    return lane;
}

/* The calling thread's lane of this window, NULL if it could not be made. */
static inline Lane *current_lane(Thread *t) {
    uint64_t window = atomic_load_explicit(&window_number, memory_order_acquire);
    return __builtin_expect(t->window == window, 1) ? t->lane : open_lane(t, window, now_ns());
}

/* The same for a new event, which is counted if it is lost. */
static inline Lane *lane_of(Thread *t) {
    Lane *lane = current_lane(t);
    if (__builtin_expect(!lane, 0)) atomic_fetch_add(&lost, 1);
    return lane;
}

/* ---- threads and forks ---- */

static void end_thread(void *pointer) {
    Thread *t = pointer;
    int is_current = atomic_load(&mode) == RECORD && t->window == atomic_load(&window_number);
    if (t->lane) release_lane(t->lane, is_current ? now_ns() : 0);
    free(t->scopes);
    memset(t, 0, sizeof *t);
}

static void before_fork(void) { pthread_mutex_lock(&lanes_lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&lanes_lock); }

/* The child records nothing until it has a folder of its own: its mappings are still the parent's files. */
static void after_fork_in_child(void) {
    atomic_store(&mode, OFF);
    atomic_fetch_add(&window_number, 1); /* native calls that were running do not record */
    while (lanes) {
        Lane *lane = lanes;
        lanes = lane->next;
        free_lane(lane);
    }
    self.lane = NULL, self.num_scopes = 0;
    pthread_mutex_unlock(&lanes_lock);
}

/* ---- called from Python ---- */

/* Scopes that were opened in an earlier session are none of this one's. */
static inline void enter_session(Thread *t) {
    uint64_t session = atomic_load_explicit(&session_number, memory_order_relaxed);
    if (t->session != session) t->num_scopes = 0, t->session = session;
}

/* setup(folder, limit in bytes): begin a session, with lanes in this folder. */
static PyObject *py_setup(PyObject *module, PyObject *arguments) {
    PyObject *path; /* bytes: names of files may be in no encoding */
    long long limit;
    if (!PyArg_ParseTuple(arguments, "O&L", PyUnicode_FSConverter, &path, &limit)) return NULL;
    int is_too_long = (size_t)PyBytes_GET_SIZE(path) >= sizeof folder;
    if (is_too_long) PyErr_Format(PyExc_ValueError, "the path %s is too long", PyBytes_AS_STRING(path));
    else strcpy(folder, PyBytes_AS_STRING(path));
    Py_DECREF(path);
    if (is_too_long) return NULL;
    atomic_store(&bytes_left, limit);
    atomic_store(&lost, 0), atomic_store(&num_lanes, 0);
    atomic_fetch_add(&session_number, 1);
    Py_RETURN_NONE;
}

/* start(mode, name of the process): begin a window. */
static PyObject *py_start(PyObject *module, PyObject *arguments) {
    int wanted;
    unsigned name;
    if (!PyArg_ParseTuple(arguments, "iI", &wanted, &name)) return NULL;
    enter_session(&self);
    atomic_store(&window_start, now_ns());
    atomic_fetch_add(&window_number, 1);
    atomic_store(&mode, wanted);
    Lane *lane = lane_of(&self);
    free(process_path);
    process_path = lane ? strdup(lane->path) : NULL;
    process_index = lane ? put(lane, lane->header->start, 0, name, PROCESS, 0, 0) : -1;
    Py_RETURN_NONE;
}

/* stop(): end the window, the process's record and all threads'. Scopes that are open stay without an end. */
static PyObject *py_stop(PyObject *module, PyObject *ignored) {
    int was = atomic_exchange(&mode, OFF);
    int64_t end = now_ns();
    if (was == OFF) Py_RETURN_NONE;
    pthread_mutex_lock(&lanes_lock);
    for (Lane *lane = lanes; lane; lane = lane->next) {
        if (lane->window_number != atomic_load(&window_number)) continue;
        if (lane->used) complete(lane, 0, end);
        delete_if_empty(lane);
    }
    pthread_mutex_unlock(&lanes_lock);
    if (process_path && process_index >= 0) complete_in_file(process_path, process_index, end);
    Py_RETURN_NONE;
}

static int is_off(void) { return atomic_load_explicit(&mode, memory_order_relaxed) == OFF; }

/* begin(category, name, flags): open a scope of the calling thread. */
static PyObject *py_begin(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "begin takes 3 arguments, not %zd", count);
    Thread *t = &self;
    Scope scope = {.category = (uint8_t)PyLong_AsLong(arguments[0]),
                   .name = (uint32_t)PyLong_AsUnsignedLong(arguments[1]),
                   .flags = (uint16_t)PyLong_AsLong(arguments[2]),
                   .index = -1};
    if (PyErr_Occurred()) return NULL;
    enter_session(t);
    if (t->num_scopes == t->room_scopes) {
        uint32_t room = t->room_scopes ? 2 * t->room_scopes : 16;
        Scope *scopes = realloc(t->scopes, room * sizeof *scopes);
        if (!scopes) return PyErr_NoMemory();
        t->scopes = scopes, t->room_scopes = room;
        release_at_exit(t);
    }
    if (!is_off()) {
        Lane *lane = lane_of(t);
        if (lane) scope.index = put(lane, now_ns(), 0, scope.name, scope.category, t->num_scopes, scope.flags);
    }
    t->scopes[t->num_scopes++] = scope;
    Py_RETURN_NONE;
}

/* end(category, name): close the scope. None if it was the innermost, or was opened before the session. Else the name of the
 * innermost; the scope, if the thread has it, is closed with all that are in it. */
static PyObject *py_end(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "end takes 2 arguments, not %zd", count);
    Thread *t = &self;
    uint8_t category = (uint8_t)PyLong_AsLong(arguments[0]);
    uint32_t name = (uint32_t)PyLong_AsUnsignedLong(arguments[1]);
    if (PyErr_Occurred()) return NULL;
    enter_session(t);
    if (!t->num_scopes) Py_RETURN_NONE;
    uint32_t innermost = t->num_scopes - 1, at = innermost;
    uint32_t innermost_name = t->scopes[innermost].name;
    while (t->scopes[at].name != name || t->scopes[at].category != category)
        if (at-- == 0) return PyLong_FromUnsignedLong(innermost_name);
    Lane *lane = is_off() ? NULL : current_lane(t);
    int64_t end = now_ns();
    for (uint32_t i = innermost + 1; lane && i-- > at;) complete(lane, t->scopes[i].index, end);
    t->num_scopes = at;
    if (at == innermost) Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(innermost_name);
}

/* record(start, end, category, name, depth): an event that has ended; one that began before the window is left out. */
static PyObject *py_record(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 5) return PyErr_Format(PyExc_TypeError, "record takes 5 arguments, not %zd", count);
    int64_t start = PyLong_AsLongLong(arguments[0]), end = PyLong_AsLongLong(arguments[1]);
    uint8_t category = (uint8_t)PyLong_AsLong(arguments[2]);
    uint32_t name = (uint32_t)PyLong_AsUnsignedLong(arguments[3]), depth = (uint32_t)PyLong_AsUnsignedLong(arguments[4]);
    if (PyErr_Occurred()) return NULL;
    if (is_off() || start < atomic_load(&window_start)) Py_RETURN_NONE;
    uint64_t window = atomic_load(&window_number);
    if (self.window != window) open_lane(&self, window, start); /* the thread has lived that long */
    Lane *lane = lane_of(&self);
    if (lane && start >= lane->header->start) put(lane, start, end, name, category, depth, FROM_PYTHON);
    Py_RETURN_NONE;
}

/* lost(): events of threads that could not make a lane. */
static PyObject *py_lost(PyObject *module, PyObject *ignored) { return PyLong_FromUnsignedLongLong(atomic_load(&lost)); }

#define RECORDER_METHODS                                                                                     \
    {"setup", py_setup, METH_VARARGS, NULL}, {"start", py_start, METH_VARARGS, NULL},                        \
    {"stop", py_stop, METH_NOARGS, NULL}, {"begin", (PyCFunction)(void *)py_begin, METH_FASTCALL, NULL},     \
    {"end", (PyCFunction)(void *)py_end, METH_FASTCALL, NULL},                                               \
    {"record", (PyCFunction)(void *)py_record, METH_FASTCALL, NULL}, {"lost", py_lost, METH_NOARGS, NULL}

static int initialize_recorder(void) {
    int failed = pthread_key_create(&at_thread_exit, end_thread);
    return failed ? failed : pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}
