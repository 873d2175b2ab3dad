/* A libnvidia-ml.so.1 for tests: it shows the devices of a simulated file (layout: stagelaunch/devices/simlayout.py)
 * to the real pynvml. FAKE_NVML_FILE names the file, FAKE_NVML_FAULT one thing to get wrong, FAKE_NVML_RESERVED the
 * bytes the driver keeps for itself. It reads only, and counts a process only while the lock on its slot is held.
 *
 * A row of the file is a device. Faults of one device carry its row: hang_device_1 and lost_device_1 (every call),
 * hang_memory_1 (the figures). FAKE_NVML_UUIDS lists the UUIDs by row, FAKE_NVML_NAME is the name of all,
 * FAKE_NVML_ORDER lists the rows in the order of the driver, FAKE_NVML_MIG "0:1,2" makes rows 1, 2 MIG devices of 0. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7,
       NOT_LOADED = 9, NO_FUNCTION = 13, LOST = 15, UNKNOWN = 999 };

struct header { char magic[8]; uint32_t version, devices, slots, mutex_pid; uint64_t context, size, unused[3]; };
struct device { uint32_t index, error; uint64_t total, foreign, unused; };
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

static int fd = -1;
static struct header *head;
static int second_calls;

static int fault(const char *name) {
    const char *set = getenv("FAKE_NVML_FAULT");
    return set && !strcmp(set, name);
}

/* The place of a row in a list like "2,0,1", or -1. */
static int place_in(const char *list, unsigned row) {
    for (int place = 0; list; place++) {
        if (strtoul(list, NULL, 10) == row) return place;
        if ((list = strchr(list, ','))) list++;
    }
    return -1;
}

static unsigned long long reserved_bytes(void) {
    const char *set = getenv("FAKE_NVML_RESERVED");
    return set ? strtoull(set, NULL, 10) : 0;
}

static struct device *devices(void) { return (struct device *)(head + 1); }
static uint64_t *pids(void) { return (uint64_t *)(devices() + head->devices); }
static uint64_t *bytes_of(struct device *d) { return pids() + head->slots * (2 + (d - devices())); }

static int fault_of(const char *name, struct device *d) {
    char full[64];
    snprintf(full, sizeof full, "%s_%u", name, (unsigned)(d - devices()));
    return fault(full);
}

/* What every call on a device does first. */
static int broken(struct device *d) {
    if (fault_of("hang_device", d)) for (;;) pause();
    return fault_of("lost_device", d) ? LOST : OK;
}

/* The place of a row among the MIG devices of the GPU that is cut; -1 for a GPU. */
static int mig_place(unsigned row) {
    const char *set = getenv("FAKE_NVML_MIG");
    return set ? place_in(strchr(set, ':') + 1, row) : -1;
}

static int is_cut(struct device *d) {
    const char *set = getenv("FAKE_NVML_MIG");
    return set && strtoul(set, NULL, 10) == (unsigned long)(d - devices());
}

static void uuid_of(struct device *d, char *text, unsigned size) {
    const char *set = getenv("FAKE_NVML_UUIDS");
    for (int row = d - devices(); set && row; row--)
        if ((set = strchr(set, ','))) set++;
    if (set) snprintf(text, size, "%.*s", (int)strcspn(set, ","), set);
    else snprintf(text, size, "SIM-00000000-0000-0000-0000-%012x", d->index);
}

static int is_live(uint32_t slot) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    lock.l_start = (char *)(pids() + slot) - (char *)head;
    return pids()[slot] && !fcntl(fd, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK;
}

static unsigned long long used_bytes(struct device *d) {
    unsigned long long used = d->foreign;
    for (uint32_t slot = 0; slot < head->slots; slot++)
        if (is_live(slot)) used += bytes_of(d)[slot];
    return used;
}

static unsigned inits;

int nvmlInitWithFlags(unsigned flags) {
    struct stat there;
    const char *path = getenv("FAKE_NVML_FILE");
    (void)flags;
    if (fault("driver_not_loaded")) return NOT_LOADED;
    if (fault("hang")) for (;;) pause();
    if (fault("crash")) abort();
    if (inits++) return OK;
    if (!path || (fd = open(path, O_RDWR | O_CLOEXEC)) < 0 || fstat(fd, &there)) return UNKNOWN;
    head = mmap(NULL, there.st_size, PROT_READ, MAP_SHARED, fd, 0);
    return head == MAP_FAILED || memcmp(head->magic, "SLSIMDEV", 8) || head->version != 1 ? UNKNOWN : OK;
}

int nvmlShutdown(void) {
    if (!inits) return UNINITIALIZED;
    if (!--inits) close(fd);
    return OK;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 0;
    if (!inits) return UNINITIALIZED;
    for (uint32_t row = 0; row < head->devices; row++) *count += mig_place(row) < 0;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **handle) {
    const char *order = getenv("FAKE_NVML_ORDER");
    for (uint32_t row = 0; row < head->devices; row++) {
        unsigned place = 0;
        for (uint32_t other = 0; other < row; other++) place += mig_place(other) < 0;
        if (order) place = place_in(order, row);
        if (mig_place(row) < 0 && place == index) { *handle = devices() + row; return OK; }
    }
    return INVALID;
}

int nvmlDeviceGetMigMode(struct device *d, unsigned *current, unsigned *pending) {
    int code = broken(d);
    if (code || !getenv("FAKE_NVML_MIG")) return code ? code : NOT_SUPPORTED;
    *current = *pending = is_cut(d);
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *d, unsigned *count) {
    *count = 7;
    return broken(d);
}

/* The places 1, 3, ... are taken: instances that went have left gaps. */
int nvmlDeviceGetMigDeviceHandleByIndex(struct device *d, unsigned place, struct device **handle) {
    if (!is_cut(d) || place >= 7) return INVALID;
    for (uint32_t row = 0; row < head->devices; row++)
        if (mig_place(row) >= 0 && place == 2 * (unsigned)mig_place(row) + 1) { *handle = devices() + row; return OK; }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(struct device *d, char *text, unsigned size) {
    uuid_of(d, text, size);
    return broken(d);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **handle) {
    char text[96];
    for (uint32_t row = 0; row < head->devices; row++) {
        uuid_of(devices() + row, text, sizeof text);
        if (!strcmp(text, uuid)) { *handle = devices() + row; return OK; }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(struct device *d, char *text, unsigned size) {
    const char *name = getenv("FAKE_NVML_NAME");
    if (name) snprintf(text, size, "%s", name);
    else snprintf(text, size, "Fake H100 %u", d->index);
    return broken(d);
}

int nvmlDeviceGetMemoryInfo(struct device *d, struct memory *m) {
    if (fault_of("hang_memory", d)) for (;;) pause();
    m->total = d->total + reserved_bytes();
    m->used = used_bytes(d) + reserved_bytes();
    m->free = m->total - m->used;
    return broken(d);
}

int nvmlDeviceGetMemoryInfo_v2(struct device *d, struct memory_v2 *m) {
    if (fault_of("hang_memory", d)) for (;;) pause();
    if (fault("no_memory_v2")) return NO_FUNCTION;
    if (m->version != (sizeof *m | 2u << 24)) return INVALID;
    m->total = d->total + reserved_bytes();
    m->reserved = reserved_bytes();
    m->used = used_bytes(d);
    m->free = d->total - m->used;
    return broken(d);
}

int nvmlDeviceGetComputeRunningProcesses_v2(struct device *d, unsigned *count, struct process *table) {
    unsigned room = *count, found = 0;
    int code = broken(d);
    if (code) return code;
    if (fault("processes_hidden")) return NO_PERMISSION;
    if (fault("processes_raise")) return UNKNOWN;
    if (table && (fault("table_keeps_growing") || (fault("table_grows_once") && !second_calls++))) return TOO_SMALL;
    for (uint32_t slot = 0; slot < head->slots; slot++) {
        if (!is_live(slot) || !bytes_of(d)[slot]) continue;
        if (table && found < room) {
            unsigned long long used = bytes_of(d)[slot];
            if (fault("sizes_unknown")) used = ~0ull;
            if (fault("sizes_zero")) used = 0;
            table[found] = (struct process){pids()[slot], used, ~0u, ~0u};
        }
        found++;
    }
    *count = found;
    return found > room ? TOO_SMALL : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct device *d, unsigned *count, struct process *table) {
    return fault("no_processes_v3") ? NO_FUNCTION : nvmlDeviceGetComputeRunningProcesses_v2(d, count, table);
}
