// The devices and the bytes that each process holds of them. /dev/shm/null_gpu.NAME.DEVICE has an entry a process; one
// whose process has ended counts nothing, so nobody has to clean up after a SIGKILL. After these comes an entry of no
// process: the most bytes that all held together.
#define _GNU_SOURCE
#include "null_gpu.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_PROCESSES 512
typedef struct {
    int pid;
    uint64_t start; // with the pid: the pid alone may be given again
    uint64_t bytes;
} Entry;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

int physical_devices(void) {
    int devices = atoi(setting("NULL_GPU_COUNT", "1"));
    return devices < MAX_DEVICES ? devices : MAX_DEVICES;
}

uint64_t device_bytes(void) { return strtoull(setting("NULL_GPU_BYTES", "85520809984"), NULL, 10); }
bool numbers(void) { return *setting("NULL_GPU_NUMBERS", "0") == '1'; }

// CUDA reads the variable once, when it is first used: an index or a UUID each, until one that is not there.
static int visible[MAX_DEVICES], num_visible;
static void read_visible(void) {
    const char *listed = getenv("CUDA_VISIBLE_DEVICES");
    if (!listed) {
        for (; num_visible < physical_devices(); num_visible++) visible[num_visible] = num_visible;
        return;
    }
    for (const char *item = listed; item && *item && num_visible < MAX_DEVICES; item = strchr(item, ',')) {
        item += *item == ',';
        bool by_uuid = !strncmp(item, "GPU-", 4);
        char *end;
        long index = by_uuid ? strtol(item + 4, &end, 16) - 1 : strtol(item, &end, 10);
        if (end == item || index < 0 || index >= physical_devices()) return;
        visible[num_visible++] = index;
    }
}

static pthread_once_t visible_once = PTHREAD_ONCE_INIT;
int visible_devices(void) { return pthread_once(&visible_once, read_visible), num_visible; }
int physical_device(int ordinal) { return ordinal >= 0 && ordinal < visible_devices() ? visible[ordinal] : -1; }

uint64_t process_start(int pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return 0;
    text[length] = 0;
    char *after_name = strrchr(text, ')'); // the name may hold spaces; the state is field 3, the start field 22
    if (!after_name || after_name[2] == 'Z' || after_name[2] == 'X') return 0;
    char *field = after_name + 2;
    for (int index = 3; index < 22; index++) field = strchr(field, ' ') + 1;
    return strtoull(field, NULL, 10);
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    int file;
    Entry *entries;
} tables[MAX_DEVICES];

// flock is released by the kernel when its holder dies; between threads, which share the descriptor, the mutex stands.
static Entry *lock_table(int device) {
    pthread_mutex_lock(&mutex);
    if (!tables[device].entries) {
        char path[256];
        snprintf(path, sizeof path, "/dev/shm/null_gpu.%s.%d", setting("NULL_GPU_NAME", "default"), device);
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        size_t bytes = (MAX_PROCESSES + 1) * sizeof(Entry);
        void *entries = file < 0 || ftruncate(file, bytes)
                            ? MAP_FAILED
                            : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (entries == MAP_FAILED) {
            say("%s cannot be opened and mapped: /dev/shm must be writable.", path);
            abort();
        }
        tables[device].file = file, tables[device].entries = entries;
    }
    flock(tables[device].file, LOCK_EX);
    return tables[device].entries;
}

static void unlock_table(int device) {
    flock(tables[device].file, LOCK_UN);
    pthread_mutex_unlock(&mutex);
}

static uint64_t sum_of_living(Entry *entries) {
    uint64_t bytes = 0;
    for (Entry *entry = entries; entry < entries + MAX_PROCESSES; entry++) {
        if (entry->pid && process_start(entry->pid) != entry->start) *entry = (Entry){0};
        bytes += entry->bytes;
    }
    return bytes;
}

// A process that was forked has the maps of its parent but none of its bytes: its entry is its own.
static Entry *own_entry(Entry *entries) {
    int pid = getpid();
    Entry *free_entry = NULL;
    for (Entry *entry = entries; entry < entries + MAX_PROCESSES; entry++) {
        if (entry->pid == pid) return entry;
        if (!entry->pid && !free_entry) free_entry = entry;
    }
    if (!free_entry) {
        say("more than %d processes use one device.", MAX_PROCESSES);
        abort();
    }
    *free_entry = (Entry){.pid = pid, .start = process_start(pid)};
    return free_entry;
}

uint64_t device_used(int device) {
    uint64_t bytes = sum_of_living(lock_table(device));
    unlock_table(device);
    return bytes;
}

bool take_bytes(int device, uint64_t bytes) {
    Entry *entries = lock_table(device), *most = entries + MAX_PROCESSES;
    uint64_t held = sum_of_living(entries) + bytes;
    bool fits = held <= device_bytes();
    if (fits) own_entry(entries)->bytes += bytes;
    if (fits && held > most->bytes) most->bytes = held;
    unlock_table(device);
    return fits;
}

void return_bytes(int device, uint64_t bytes) {
    own_entry(lock_table(device))->bytes -= bytes;
    unlock_table(device);
}

static atomic_long counters[NUM_COUNTERS];
static const char *const counter_names[NUM_COUNTERS] = {
    "stream_synchronizes", "event_synchronizes", "device_synchronizes", "blocking_copies",    "copies",
    "copied_bytes",        "launches",           "pinned_allocations",  "device_allocations", "collectives",
    "unanswered",
};

void count(Counter counter, long amount) { atomic_fetch_add(&counters[counter], amount); }

// -1 for a name that is none of counter_names.
EXPORT long null_gpu_count(const char *name) {
    for (int index = 0; index < NUM_COUNTERS; index++)
        if (!strcmp(name, counter_names[index])) return atomic_load(&counters[index]);
    return -1;
}

EXPORT uint64_t null_gpu_used(int device) { return device_used(device); }

// The most that was held of a device since the last question.
EXPORT uint64_t null_gpu_most(int device) {
    Entry *entries = lock_table(device), *most = entries + MAX_PROCESSES;
    uint64_t held = most->bytes;
    most->bytes = sum_of_living(entries);
    unlock_table(device);
    return held;
}

void say(const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = snprintf(text, sizeof text, "null GPU: ");
    vsnprintf(text + length, sizeof text - length, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s\n", text);
    FILE *log = getenv("NULL_GPU_LOG") ? fopen(getenv("NULL_GPU_LOG"), "a") : NULL;
    if (log) {
        fprintf(log, "%s\n", text);
        fclose(log);
    }
}

int unanswered(const char *name, int error) {
    count(UNANSWERED, 1);
    if (!numbers()) return SUCCESS;
    say("%s was called, which nothing answers with numbers.", name);
    return error;
}
