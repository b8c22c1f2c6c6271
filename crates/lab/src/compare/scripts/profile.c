/* A plugin of QEMU 7.2 (API version 1) that counts the instructions of every block of code, told
 * apart by its virtual address and by where its page lies in the emulator's memory: domains have
 * the same addresses but no page in common.
 *
 * The file REQUEST, which is looked for all the time, names an address and another file. From then
 * on, each time the emulated machine executes that address, all counters are written there, under
 * a name with a number more, before it goes on: what else this machine does is in no count. They
 * are written as quadruples of 64-bit numbers. REQUEST is removed when it was read.
 * Argument: request=FILE. The declarations are those of the plugin interface. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef uint64_t qemu_plugin_id_t;
typedef void (*on_translation)(qemu_plugin_id_t, struct qemu_plugin_tb *);
typedef void (*on_execution)(unsigned, void *);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, on_translation);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
void *qemu_plugin_insn_haddr(const struct qemu_plugin_insn *);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int op, void *, uint64_t);
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *, on_execution, int flags, void *);

#define ADD_U64 0
#define NO_REGISTERS 0
#define SLOTS ((size_t)1 << 22)

struct block {
    uint64_t address, place, instructions;
    volatile uint64_t count;
};

int qemu_plugin_version = 1;
static struct block *blocks;
static size_t used;
static char request[512], counters[512];
static volatile uint64_t mark;
static unsigned marks;

static struct block *find(uint64_t address, uint64_t place, uint64_t instructions)
{
    uint64_t hash = address * 0x9E3779B97F4A7C15u ^ place * 0xC2B2AE3D27D4EB4Fu ^ instructions;
    hash ^= hash >> 29;
    hash *= 0xBF58476D1CE4E5B9u;
    hash ^= hash >> 32;
    for (size_t slot = hash % SLOTS;; slot = (slot + 1) % SLOTS) {
        struct block *block = &blocks[slot];
        if (block->instructions == 0) {
            if (used > SLOTS / 10 * 9)
                return NULL;
            used++;
            block->address = address;
            block->place = place;
            block->instructions = instructions;
            return block;
        }
        if (block->address == address && block->place == place &&
            block->instructions == instructions)
            return block;
    }
}

static void marked(unsigned cpu, void *unused)
{
    char part[540], name[540];
    (void)cpu, (void)unused;
    snprintf(name, sizeof name, "%s.%u", counters, marks++);
    snprintf(part, sizeof part, "%s.new", counters);
    FILE *out = fopen(part, "wb");
    if (out == NULL)
        return;
    for (size_t slot = 0; slot < SLOTS; slot++) {
        struct block *block = &blocks[slot];
        uint64_t record[4] = {block->address, block->place, block->instructions, block->count};
        if (block->count != 0)
            fwrite(record, sizeof record, 1, out);
    }
    fclose(out);
    rename(part, name);
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
    size_t count = qemu_plugin_tb_n_insns(tb);
    uint64_t address = qemu_plugin_tb_vaddr(tb);
    (void)id;
    if (count == 0)
        return;
    if (mark != 0 && address == mark)
        qemu_plugin_register_vcpu_tb_exec_cb(tb, marked, NO_REGISTERS, NULL);
    void *place = qemu_plugin_insn_haddr(qemu_plugin_tb_get_insn(tb, 0));
    struct block *block = find(address, (uint64_t)place, count);
    if (block != NULL)
        qemu_plugin_register_vcpu_tb_exec_inline(tb, ADD_U64, (void *)&block->count, count);
}

static void *serve(void *unused)
{
    for (;; usleep(20000)) {
        unsigned long long address;
        FILE *in = fopen(request, "r");
        if (in == NULL)
            continue;
        int ok = fscanf(in, "%llx %511[^\n]", &address, counters) == 2;
        fclose(in);
        if (ok)
            mark = address;
        unlink(request);
    }
    return unused;
}

int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv)
{
    pthread_t thread;
    (void)info;
    if (argc != 1 || strncmp(argv[0], "request=", 8) != 0)
        return -1;
    snprintf(request, sizeof request, "%s", argv[0] + 8);
    blocks = calloc(SLOTS, sizeof *blocks);
    if (blocks == NULL || pthread_create(&thread, NULL, serve, NULL) != 0)
        return -1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    return 0;
}
