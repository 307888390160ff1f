// Every primitive once, for a test of the emulator itself.
#include "device.h"

struct Params { const u16* left; const u16* right; float* product; float* sums; u32* seen; };

KERNEL(primitives, Params, 64)
{
    // D (16 x 8) = left (16 x 16) x right (16 x 8), by way of shared memory and ldmatrix; B is stored (n, k).
    u16* tile = (u16*)shared();
    if (warp() == 0) {
        copy_async(tile + lane() * 8, p.left + lane() * 8, true);
        copy_async(tile + 256 + lane() * 8, p.right + lane() * 8, lane() < 16);
    }
    copy_commit();
    copy_wait<0>();
    sync_block();
    u32 a[4], b4[4], b[2];
    ldmatrix4(a, tile + (lane() % 16) * 16 + (lane() / 16) * 8);
    ldmatrix4(b4, tile + 256 + (lane() % 8) * 16 + (lane() / 8 % 2) * 8);
    b[0] = b4[0];
    b[1] = b4[1];
    float d[4] = {0, 0, 0, 0};
    mma<BF16>(d, a, b);
    if (warp() == 0) {
        float* row = p.product + (block_x() * 16 + lane() / 4) * 8 + lane() % 4 * 2;
        row[0] = d[0]; row[1] = d[1]; row[64] = d[2]; row[65] = d[3];
    }
    // The sum of all thread numbers of a cluster, by shuffles, shared memory and the memory of other blocks.
    float* part = (float*)(shared() + 1024);
    const float mine = warp_sum(float(block_x() * 64 + thread()));
    if (lane() == 0) part[warp()] = mine;
    sync_cluster();
    float all = 0;
    for (int rank = 0; rank < cluster_size(); ++rank) all += cluster_read(part, rank) + cluster_read(part + 1, rank);
    const u32 odd = ballot(lane() % 2);
    if (thread() == 0) {
        p.sums[block_x()] = all;
        p.seen[block_x()] = odd;
    }
    sync_cluster();
}

struct Broken { int how; };

KERNEL(broken, Broken, 64)
{
    if (p.how == 1 && warp() == 0) sync_cluster();
    if (p.how == 1 && warp() == 1) sync_block();
    if (p.how == 2 && thread() == 0) shared()[256] = 1;
    if (p.how == 3) load4(shared() + 4);
    if (p.how == 4 && thread() == 0) mbarrier_expect((u64*)shared(), 8);
}
