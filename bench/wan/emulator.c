/* A wide-area network between TUN devices, for measurements on one machine.
 *
 *   emulator PREFIX ONE_WAY_S LOSS QUEUE_S UP:DOWN [UP:DOWN ...]          (rates in bytes per second)
 *
 * Makes one TUN device PREFIX<k> per host and forwards IPv4 to 10.66.x.y, host number 256 x + y - 1:
 *   uplink shaper with tail drop -> one-way delay -> loss -> downlink shaper with tail drop -> write.
 * Packets keep their offloads and are up to 64 KB; the shapers count the bytes of the Ethernet frames they would be cut
 * into, and a downlink starts on a burst when its first frame arrives, not its last. Loss is per frame and takes the
 * whole burst with it, so it costs more bytes than in life.
 *
 * Prints "ready" when the devices exist. A line on standard input is answered by one line about the time since the line
 * before: wall seconds, seconds not asleep, the greatest lateness of a packet in seconds, packets lost, then per host
 * bytes sent and packets dropped by its two queues. The end of standard input ends it, and the devices with it. */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { FRAME_HEADER = 14, FRAME = 1514, LARGEST = 65536 + 128, TICK_NS = 100000 };

struct host { int fd; double up_ns, down_ns; int64_t up_free, down_free; uint64_t sent_bytes, queue_drops; };
struct packet { uint32_t to, wire_bytes, length; int64_t first; int arrived; char bytes[]; };
struct event { int64_t due; uint64_t order; struct packet *packet; };

static struct host *hosts;
static int host_count;
static struct event *heap;
static size_t pending, room;
static uint64_t orders, losses;
static int64_t delay_ns, queue_ns, asleep_ns, since, latest;
static double loss;

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

static int before(const struct event *a, const struct event *b)
{
    return a->due < b->due || (a->due == b->due && a->order < b->order);
}

static void schedule(int64_t due, struct packet *packet)
{
    struct event event = {due, orders++, packet};
    if (pending == room && !(heap = realloc(heap, (room = room ? 2 * room : 4096) * sizeof *heap))) err(1, "memory");
    size_t i = pending++;
    for (; i && before(&event, &heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = event;
}

static struct event earliest(void)
{
    struct event first = heap[0], last = heap[--pending];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < pending; heap[i] = heap[child], i = child) {
        if (child + 1 < pending && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &last)) break;
    }
    heap[i] = last;
    return first;
}

/* Frames that a packet is cut into on the wire. */
static uint32_t frames(const char *bytes, uint32_t length, uint32_t *wire_bytes)
{
    const struct virtio_net_hdr *offload = (const void *)bytes;
    const struct iphdr *ip = (const void *)(offload + 1);
    const struct tcphdr *tcp = (const void *)((const char *)ip + ip->ihl * 4);
    uint32_t whole = length - sizeof *offload, count = 1, headers = 0;
    if (offload->gso_type != VIRTIO_NET_HDR_GSO_NONE && offload->gso_size) {
        headers = ip->ihl * 4 + tcp->doff * 4;
        count = (whole - headers + offload->gso_size - 1) / offload->gso_size;
    }
    *wire_bytes = whole + (count - 1) * headers + count * FRAME_HEADER;
    return count;
}

static void take_in(struct host *from, const char *bytes, uint32_t length)
{
    const struct iphdr *ip = (const void *)(bytes + sizeof(struct virtio_net_hdr));
    if (length < sizeof(struct virtio_net_hdr) + sizeof *ip || ip->version != 4) return;
    uint32_t to = (ntohl(ip->daddr) & 0xffff) - 1, wire_bytes, count = frames(bytes, length, &wire_bytes);
    if (ntohl(ip->daddr) >> 16 != (10 << 8 | 66) || to >= (uint32_t)host_count) return;
    int64_t now = now_ns(), start = later(now, from->up_free);
    if (start - now > queue_ns) { from->queue_drops++; return; }
    from->up_free = start + (int64_t)(wire_bytes * from->up_ns);
    from->sent_bytes += wire_bytes;
    for (uint32_t i = 0; loss > 0 && i < count; i++) if (drand48() < loss) { losses++; return; }
    struct packet *packet = malloc(sizeof *packet + length);
    if (!packet) err(1, "memory");
    *packet = (struct packet){to, wire_bytes, length, start + delay_ns, 0};
    memcpy(packet->bytes, bytes, length);
    schedule(from->up_free + delay_ns, packet);
}

static void happen(struct event event)
{
    struct packet *packet = event.packet;
    struct host *to = &hosts[packet->to];
    if (packet->arrived || to->down_free - event.due > queue_ns) {
        if (!packet->arrived || write(to->fd, packet->bytes, packet->length) < 0) to->queue_drops++;
        free(packet);
        return;
    }
    uint32_t last_frame = packet->wire_bytes < FRAME ? packet->wire_bytes : FRAME;
    to->down_free = later(later(to->down_free, packet->first) + (int64_t)(packet->wire_bytes * to->down_ns),
                          event.due + (int64_t)(last_frame * to->down_ns));
    packet->arrived = 1;
    schedule(to->down_free, packet);
}

static void answer(void)
{
    char line[256];
    if (read(0, line, sizeof line) <= 0) exit(0);
    int64_t wall = now_ns() - since;
    printf("%.6f %.6f %.6f %lu", wall / 1e9, (wall - asleep_ns) / 1e9, latest / 1e9, (unsigned long)losses);
    for (int i = 0; i < host_count; i++) {
        printf(" %lu %lu", (unsigned long)hosts[i].sent_bytes, (unsigned long)hosts[i].queue_drops);
        hosts[i].sent_bytes = hosts[i].queue_drops = 0;
    }
    puts("");
    fflush(stdout);
    since += wall;
    asleep_ns = latest = losses = 0;
}

static int tun(const char *prefix, int number)
{
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    snprintf(request.ifr_name, IFNAMSIZ, "%s%d", prefix, number);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) || ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4))
        err(1, "TUN device %s%d", prefix, number);
    return fd;
}

int main(int argc, char **argv)
{
    if (argc < 6) errx(2, "usage: emulator PREFIX ONE_WAY_S LOSS QUEUE_S UP:DOWN ...");
    delay_ns = (int64_t)(atof(argv[2]) * 1e9), loss = atof(argv[3]), queue_ns = (int64_t)(atof(argv[4]) * 1e9);
    host_count = argc - 5;
    hosts = calloc(host_count, sizeof *hosts);
    int poll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event ready[64], wish = {EPOLLIN, {.u32 = UINT32_MAX}};
    epoll_ctl(poll, EPOLL_CTL_ADD, 0, &wish);
    for (int i = 0; i < host_count; i++) {
        double up, down;
        if (sscanf(argv[5 + i], "%lf:%lf", &up, &down) != 2 || up <= 0 || down <= 0) errx(2, "rates: %s", argv[5 + i]);
        hosts[i] = (struct host){.fd = tun(argv[1], i), .up_ns = 1e9 / up, .down_ns = 1e9 / down};
        wish.data.u32 = i;
        epoll_ctl(poll, EPOLL_CTL_ADD, hosts[i].fd, &wish);
    }
    sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 10}); /* late packets are no measurement */
    puts("ready");
    fflush(stdout);
    since = now_ns();
    for (char bytes[LARGEST];;) {
        int64_t slept = now_ns();
        if (pending) nanosleep(&(struct timespec){0, TICK_NS}, NULL); /* packets in batches: fewer wake-ups */
        int count = epoll_wait(poll, ready, 64, pending ? 0 : -1);
        asleep_ns += now_ns() - slept;
        for (int i = 0; i < count; i++) {
            if (ready[i].data.u32 == UINT32_MAX) { answer(); continue; }
            struct host *host = &hosts[ready[i].data.u32];
            for (int n = 0; n < 64; n++) { /* then the others; epoll says again that there is more */
                ssize_t length = read(host->fd, bytes, sizeof bytes);
                if (length <= 0) break;
                take_in(host, bytes, length);
            }
        }
        for (int64_t now = now_ns(); pending && heap[0].due <= now; now = now_ns()) {
            struct event event = earliest();
            latest = later(latest, now - event.due);
            happen(event);
        }
    }
}
