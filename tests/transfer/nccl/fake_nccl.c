/* A libnccl and a CUDA device of host memory, for tests of the nccl transport on machines without either.
 *
 * What it stands for: the verbs, their return codes and when they may be called; communicators of up to four processes (or
 * ends in one process; windows: two) that are made in the background; operations that run in the order of their stream, need both
 * ends, and spin without noticing that the other end has died; events. What it does not: bandwidth, SMs, kernels.
 *
 * It is strict. Whatever the real library leaves undefined ends the process: a handle used after its abort, two threads
 * on one communicator, a stream that nobody made. `fake_script` makes a verb fail, hang or end the process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM = 2, ARGUMENT = 4, USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum { RANKS = 4, GROUP = 16, RING = 1 << 16, MAGIC = (int)0xcafebeef };

typedef struct { char path[128]; } Id;
typedef struct {
    size_t size; unsigned magic, version;
    int blocking, cga, min_ctas, max_ctas; const char *net; int split, traffic; const char *name;
} Config;

/* One direction between two ranks: bytes written and read so far, and the last 64 KiB of them. */
typedef struct { _Atomic uint64_t written, read; uint8_t bytes[RING]; } Ring;
typedef struct {
    _Atomic int here[RANKS]; Ring ring[RANKS][RANKS];  /* ring[r][p]: what rank r sends to rank p */
    _Atomic int registered[2], puts[2]; char window[2][160]; size_t window_bytes[2];
} Shared;

typedef struct Comm {
    int rank, ranks; _Atomic int state, aborted, inside; Shared *shared; char path[128]; pthread_t joiner;
    _Atomic int running;
    int lag; struct Op *deferred[GROUP]; int deferrals; struct Stream *on;
    uint8_t *window, *peer_window; size_t window_bytes; void **handle; pthread_t registrar; int registers, put;
} Comm;

typedef void (*Call)(void);
typedef struct Op {
    struct Op *next; Comm *comm; int sends, peer, stuck; uint8_t *at, *to; size_t left;
    _Atomic int *event, *awaited; Call call;
} Op;
typedef struct Stream { pthread_mutex_t lock; pthread_cond_t more; Op *first, **last; int busy, closed; pthread_t thread; int stalled; } Stream;

/* ---- scripts: the next call of a verb, by a rank or anybody (-1), after `skip` more */
enum { FAIL = 1, HANG, DIE, STALL, ASYNC };
typedef struct { char verb[24]; int rank, skip, action, code, taken; } Script;
static Script scripts[16];
static int scripted;
static pthread_mutex_t script_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int released, made_comms, live_comms, aborts, running_ops, most_ops, calls, pace_us;

static void die(const char *why, ...) {
    va_list list;
    va_start(list, why);
    fprintf(stderr, "fake nccl: ");
    vfprintf(stderr, why, list);
    fprintf(stderr, "\n");
    abort();
}

int fake_script(const char *verb, int rank, int skip, int action, int code) {
    pthread_mutex_lock(&script_lock);
    Script *s = &scripts[scripted];
    snprintf(s->verb, sizeof s->verb, "%s", verb);
    s->rank = rank; s->skip = skip; s->action = action; s->code = code; s->taken = 0;
    pthread_mutex_unlock(&script_lock);
    return scripted++;
}
int fake_taken(int number) { return scripts[number].taken; }
void fake_release(void) { released++; }
void fake_reset(void) {
    pthread_mutex_lock(&script_lock);
    scripted = 0;
    pthread_mutex_unlock(&script_lock);
    released++; most_ops = 0; pace_us = 0;
}
void fake_pace(int us) { pace_us = us; }  /* how long each operation lasts, at least */
int fake_count(const char *what) {
    if (!strcmp(what, "made")) return made_comms;
    if (!strcmp(what, "live")) return live_comms;
    if (!strcmp(what, "aborts")) return aborts;
    if (!strcmp(what, "most")) return most_ops;
    if (!strcmp(what, "running")) return running_ops;
    return -1;
}

/* Returns an action that the caller must carry out itself (FAIL, STALL, ASYNC), or 0. */
static int script(const char *verb, int rank, int *code) {
    int action = 0;
    calls++;
    pthread_mutex_lock(&script_lock);
    for (int i = 0; i < scripted; i++) {
        Script *s = &scripts[i];
        if (s->taken || strcmp(s->verb, verb) || (s->rank >= 0 && s->rank != rank)) continue;
        if (s->skip-- > 0) continue;
        s->taken = 1; action = s->action; *code = s->code;
        break;
    }
    pthread_mutex_unlock(&script_lock);
    if (action == DIE) _exit(9);
    if (action == HANG) { int then = released; while (released == then) usleep(500); return 0; }
    return action;
}

static Comm *enter(void *handle) {
    Comm *comm = handle;
    if (!comm) die("no communicator");
    if (comm->aborted) die("a communicator is used after its abort");
    if (atomic_exchange(&comm->inside, 1)) die("two threads are on one communicator");
    return comm;
}
static int leave(Comm *comm, int status) { comm->inside = 0; return status; }

/* ---- streams and events */
static void run(Op *op) {
    Comm *comm = op->comm;
    Ring *ring = op->sends ? &comm->shared->ring[comm->rank][op->peer] : &comm->shared->ring[op->peer][comm->rank];
    if (pace_us) usleep(pace_us);
    while (op->to && op->left && !comm->aborted) {  /* a put: nothing of the other end is needed */
        size_t some = op->left < RING ? op->left : RING;
        if (op->stuck) { usleep(500); continue; }
        memcpy(op->to, op->at, some);
        __sync_synchronize();
        op->at += some; op->to += some; op->left -= some;
    }
    if (op->to) op->left = 0;
    while (op->left && !comm->aborted) {
        if (op->stuck) { usleep(500); continue; }
        uint64_t written = ring->written, read = ring->read;
        size_t room = op->sends ? RING - (written - read) : written - read;
        uint64_t position = op->sends ? written : read;
        size_t some = room < op->left ? room : op->left, edge = RING - position % RING;
        if (some > edge) some = edge;
        if (!some) { usleep(20); continue; }
        if (op->sends) { memcpy(ring->bytes + position % RING, op->at, some); ring->written = written + some; }
        else { memcpy(op->at, ring->bytes + position % RING, some); ring->read = read + some; }
        op->at += some; op->left -= some;
    }
    comm->running--; running_ops--;
}

static void *work(void *argument) {
    Stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->closed) { stream->busy = 0; pthread_cond_wait(&stream->more, &stream->lock); }
        if (!stream->first) break;
        Op *op = stream->first;
        stream->first = op->next;
        if (!stream->first) stream->last = &stream->first;
        stream->busy = 1;
        pthread_mutex_unlock(&stream->lock);
        while (stream->stalled) usleep(500);
        if (op->event) *op->event = 1;
        else if (op->awaited) { while (!*op->awaited) usleep(50); }
        else if (op->call) op->call();
        else run(op);
        free(op);
        pthread_mutex_lock(&stream->lock);
    }
    pthread_mutex_unlock(&stream->lock);
    return 0;
}

void *fake_stream(void) {
    Stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, 0); pthread_cond_init(&stream->more, 0);
    stream->last = &stream->first;
    pthread_create(&stream->thread, 0, work, stream);
    return stream;
}
void fake_stall_stream(void *handle, int stalled) { ((Stream *)handle)->stalled = stalled; }

static void enqueue(Stream *stream, Op *op) {
    if (!stream) die("the default stream");
    pthread_mutex_lock(&stream->lock);
    *stream->last = op; stream->last = &op->next;
    pthread_cond_signal(&stream->more);
    pthread_mutex_unlock(&stream->lock);
}
void *fake_record(void *handle) {
    _Atomic int *event = calloc(1, sizeof *event);
    Op *op = calloc(1, sizeof *op);
    op->event = event;
    enqueue(handle, op);
    return event;
}
int fake_done(void *event) { return *(_Atomic int *)event; }
void fake_wait(void *handle, void *event) {
    Op *op = calloc(1, sizeof *op);
    op->awaited = event;
    enqueue(handle, op);
}
void fake_call(void *handle, Call call) {
    Op *op = calloc(1, sizeof *op);
    op->call = call;
    enqueue(handle, op);
}

/* ---- NCCL */
int ncclGetVersion(int *version) {
    const char *told = getenv("FAKE_NCCL_VERSION");
    *version = told ? atoi(told) : 22809;
    return SUCCESS;
}
const char *ncclGetErrorString(int status) {
    return status == REMOTE ? "remote process exited" : status == IN_PROGRESS ? "in progress" : status ? "scripted error" : "no error";
}
const char *ncclGetLastError(void *comm) { (void)comm; return ""; }

int ncclGetUniqueId(Id *id) {
    int code, action = script("id", -1, &code);
    uint64_t drawn;
    if (action == FAIL) return code;
    if (getrandom(&drawn, sizeof drawn, 0) != sizeof drawn) return SYSTEM;
    const char *folder = getenv("FAKE_NCCL_DIR");
    snprintf(id->path, sizeof id->path, "%s/%016lx", folder ? folder : "/tmp", (unsigned long)drawn);
    int fd = open(id->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(Shared))) return SYSTEM;
    close(fd);
    return SUCCESS;
}

static int all_here(Comm *comm) {
    for (int rank = 0; rank < comm->ranks; rank++) if (!comm->shared->here[rank]) return 0;
    return 1;
}

static void *join(void *argument) {
    Comm *comm = argument;
    int code, action = script("joining", comm->rank, &code);
    comm->shared->here[comm->rank] = 1;
    while (!comm->aborted && (action == STALL || !all_here(comm))) usleep(200);
    if (comm->rank == 1 && all_here(comm)) unlink(comm->path);
    if (!comm->aborted) comm->state = action == FAIL ? code : SUCCESS;
    return 0;
}

int ncclCommInitRankConfig(void **out, int ranks, Id id, int rank, Config *config) {
    int code, action = script("init", rank, &code);
    if (action == FAIL) return code;
    if (ranks < 2 || ranks > RANKS || rank < 0 || rank >= ranks || config->magic != (unsigned)MAGIC) return ARGUMENT;
    if (config->blocking != 0) die("a blocking communicator: nobody could abort it");
    if (config->max_ctas < 1 || config->max_ctas > 4) die("%d channels", config->max_ctas);
    int fd = open(id.path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return SYSTEM;
    Comm *comm = calloc(1, sizeof *comm);
    comm->shared = mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    snprintf(comm->path, sizeof comm->path, "%s", id.path);
    comm->rank = rank; comm->ranks = ranks; comm->state = IN_PROGRESS;
    made_comms++; live_comms++;
    pthread_create(&comm->joiner, 0, join, comm);
    *out = comm;
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(void *handle, int *status) {
    Comm *comm = enter(handle);
    int code, action = script("async", comm->rank, &code);
    if (action == FAIL) return leave(comm, code);
    /* The first put of a communicator connects the two: both must have called one. */
    int alone = comm->put && !comm->shared->puts[1 - comm->rank];
    *status = action == ASYNC ? code : comm->lag || alone ? IN_PROGRESS : comm->state;
    if (!alone && comm->lag > 0 && --comm->lag == 0) {
        for (int i = 0; i < comm->deferrals; i++) enqueue(comm->on, comm->deferred[i]);
        comm->deferrals = 0;
    }
    return leave(comm, SUCCESS);
}

static __thread int group;

/* As in the real library, what was called is in its stream only when the communicator is in progress no more. */
static void defer(Comm *comm, Op *op, Stream *stream) {
    int code, action = script("settle", comm->rank, &code);
    if (comm->deferrals && comm->on != stream) die("two streams in one group");
    if (comm->deferrals == GROUP) die("a group of more than %d", GROUP);
    /* Sends of a group fit into the ring, so that they may go first. */
    int at = op->sends ? 0 : comm->deferrals;
    memmove(comm->deferred + at + 1, comm->deferred + at, (comm->deferrals - at) * sizeof *comm->deferred);
    comm->deferred[at] = op; comm->deferrals++; comm->on = stream;
    comm->lag = action == STALL || comm->lag < 0 ? -1 : 3;
}

static int move(const char *verb, int sends, void *at, size_t count, int type, int peer, void *handle, void *stream) {
    Comm *comm = enter(handle);
    int code, action = script(verb, comm->rank, &code);
    if (action == FAIL) return leave(comm, code);
    if (comm->state != SUCCESS) die("%s on a communicator that is not ready", verb);
    if (type != 1 || peer < 0 || peer >= comm->ranks || peer == comm->rank || !at) return leave(comm, ARGUMENT);
    Op *op = calloc(1, sizeof *op);
    op->comm = comm; op->sends = sends; op->peer = peer; op->at = at; op->left = count;
    op->stuck = action == STALL;
    comm->running++;
    int now = ++running_ops, most = most_ops;
    if (!group && now > most) most_ops = now;
    if (comm->deferrals && !group) die("%s while another call is in progress", verb);
    defer(comm, op, stream);
    return leave(comm, group ? SUCCESS : IN_PROGRESS);
}
int ncclSend(void *at, size_t count, int type, int peer, void *comm, void *stream) { return move("send", 1, at, count, type, peer, comm, stream); }
int ncclRecv(void *at, size_t count, int type, int peer, void *comm, void *stream) { return move("recv", 0, at, count, type, peer, comm, stream); }
int ncclGroupStart(void) { group++; return SUCCESS; }
int ncclGroupEnd(void) {
    int code, action = script("group", -1, &code);
    group--;
    return action == FAIL ? code : IN_PROGRESS;
}

/* ---- one-sided: memory that processes share, windows of it, puts into the other's */
typedef struct { uint8_t *at; size_t bytes; char path[160]; } Memory;
static Memory memories[256];
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int live_memories;

static Memory *memory_of(const void *at) {
    for (int i = 0; i < 256; i++)
        if (memories[i].at && (uint8_t *)at >= memories[i].at && (uint8_t *)at < memories[i].at + memories[i].bytes) return &memories[i];
    return 0;
}
int fake_memories(void) { return live_memories; }

int ncclMemAlloc(void **out, size_t bytes) {
    int code, action = script("alloc", -1, &code);
    uint64_t drawn;
    if (action == FAIL) return code;
    if (getrandom(&drawn, sizeof drawn, 0) != sizeof drawn) return SYSTEM;
    pthread_mutex_lock(&memory_lock);
    Memory *found = 0;
    for (int i = 0; i < 256 && !found; i++) if (!memories[i].at) found = &memories[i];
    if (!found) die("too many allocations");
    const char *folder = getenv("FAKE_NCCL_DIR");
    snprintf(found->path, sizeof found->path, "%s/m%016lx", folder ? folder : "/tmp", (unsigned long)drawn);
    int fd = open(found->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, bytes)) die("no memory");
    found->bytes = bytes;
    found->at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memset(found->at, 0xEE, bytes);
    close(fd);
    live_memories++;
    *out = found->at;
    pthread_mutex_unlock(&memory_lock);
    return SUCCESS;
}

int ncclMemFree(void *at) {
    int code, action = script("free", -1, &code);
    if (action == FAIL) return code;
    pthread_mutex_lock(&memory_lock);
    Memory *found = memory_of(at);
    if (!found || found->at != at) die("what was not allocated is freed");
    unlink(found->path);
    munmap(found->at, found->bytes);
    found->at = 0;
    live_memories--;
    pthread_mutex_unlock(&memory_lock);
    return SUCCESS;
}

static void *register_window(void *argument) {
    Comm *comm = argument;
    Shared *shared = comm->shared;
    int code, action = script("registering", comm->rank, &code);
    while (!comm->aborted && (action == STALL || !shared->registered[1 - comm->rank])) usleep(200);
    if (comm->aborted) return 0;
    if (action == FAIL) { comm->state = code; return 0; }
    int fd = open(shared->window[1 - comm->rank], O_RDWR | O_CLOEXEC);
    if (fd < 0) { comm->state = SYSTEM; return 0; }
    comm->peer_window = mmap(0, shared->window_bytes[1 - comm->rank], PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    *comm->handle = comm;
    comm->state = SUCCESS;
    return 0;
}

int ncclCommWindowRegister(void *handle, void *at, size_t bytes, void **out, int flags) {
    Comm *comm = enter(handle);
    int code, action = script("register", comm->rank, &code);
    *out = 0;
    if (action == FAIL) return leave(comm, code);
    if (comm->state != SUCCESS) die("a window on a communicator that is not ready");
    if (getenv("FAKE_NCCL_NO_WINDOWS")) return leave(comm, SUCCESS);
    pthread_mutex_lock(&memory_lock);
    Memory *memory = memory_of(at);
    if (!memory || memory->at != at || bytes > memory->bytes || flags != 1) die("this memory cannot be a window");
    snprintf(comm->shared->window[comm->rank], sizeof comm->shared->window[0], "%s", memory->path);
    pthread_mutex_unlock(&memory_lock);
    comm->shared->window_bytes[comm->rank] = bytes;
    comm->window = at; comm->window_bytes = bytes; comm->handle = out;
    comm->state = IN_PROGRESS; comm->registers = 1;
    comm->shared->registered[comm->rank] = 1;
    pthread_create(&comm->registrar, 0, register_window, comm);
    return leave(comm, IN_PROGRESS);
}

int ncclPutSignal(const void *at, size_t count, int type, int peer, void *window, size_t offset, int signal, int context, unsigned flags, void *handle, void *stream) {
    Comm *comm = enter(handle);
    int code, action = script("put", comm->rank, &code);
    if (action == FAIL) return leave(comm, code);
    if (comm->state != SUCCESS) die("put on a communicator that is not ready");
    if (window != comm || !comm->peer_window) die("put into no window");
    if ((uint8_t *)at < comm->window || (uint8_t *)at + count > comm->window + comm->window_bytes) return leave(comm, ARGUMENT);
    if (offset + count > comm->shared->window_bytes[1 - comm->rank]) die("put behind the end of the window");
    if (type != 1 || peer != 1 - comm->rank || signal || context || flags) return leave(comm, ARGUMENT);
    if (comm->deferrals && !group) die("put while another call is in progress");
    comm->put = 1; comm->shared->puts[comm->rank] = 1;
    Op *op = calloc(1, sizeof *op);
    op->comm = comm; op->at = (uint8_t *)at; op->to = comm->peer_window + offset; op->left = count;
    op->stuck = action == STALL;
    comm->running++; running_ops++;
    defer(comm, op, stream);
    return leave(comm, group ? SUCCESS : IN_PROGRESS);
}

int ncclCommAbort(void *handle) {
    Comm *comm = enter(handle);
    int code, action = script("abort", comm->rank, &code);
    comm->aborted = 1;
    running_ops -= comm->deferrals;
    if (action == STALL) return leave(comm, SUCCESS);
    pthread_join(comm->joiner, 0);
    if (comm->registers) pthread_join(comm->registrar, 0);
    live_comms--; aborts++;
    return leave(comm, action == FAIL ? code : SUCCESS);
}
