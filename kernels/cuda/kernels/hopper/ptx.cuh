// SPDX-License-Identifier: Apache-2.0
// Functions for instructions that only Hopper has (sm_90a): barriers in shared memory, bulk tensor copies,
// warpgroup matrix products, clusters. Each function has a plain name and is one instruction, or a few.
//
// Addresses of shared memory are 32-bit offsets in the shared window (SharedAddress). The copy engine and the
// tensor cores read and write through the "async proxy"; ordinary stores are visible to it after
// FenceAsyncProxy().
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PTX_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PTX_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace lossd::kernels::cuda::hopper {

__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// ---- clusters ----

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t Multiprocessor() {
  uint32_t id;
  asm("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

// Barrier for all threads of all blocks of the cluster. Memory accesses before the barrier are ordered before
// memory accesses after it.
__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// ---- barriers in shared memory ----
//
// A barrier (mbarrier) counts arrivals, and the bytes that copies bring. Its phase ends when all expected
// arrivals and bytes have come; then the next phase begins. Phases have the parities 0, 1, 0, ... A thread
// that waits for parity 1 on a new barrier goes on at once, as if a phase before the first had ended.

__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the cluster and to the copy engine.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives once at the barrier, and adds `bytes` to the bytes that copies must bring before the phase ends.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives once at the barrier at the same address in block `rank` of the cluster.
__device__ __forceinline__ void ArriveAt(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Waits until the phase with this parity has ended.
__device__ __forceinline__ void Wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same. In addition, data that other blocks of the cluster wrote before they arrived is visible
// afterwards.
__device__ __forceinline__ void WaitForCluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Writes `value` to shared memory of block `rank` of the cluster, at the address `to`. The four bytes count
// at the barrier of that block, at the address `barrier`.
__device__ __forceinline__ void SendFloat(uint32_t to, float value, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{.reg .b32 remote, remote_barrier; mapa.shared::cluster.u32 remote, %0, %3;"
      "mapa.shared::cluster.u32 remote_barrier, %2, %3;"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [remote], %1, [remote_barrier];}" ::"r"(
          to),
      "f"(value), "r"(barrier), "r"(rank)
      : "memory");
}

// Named barrier of the block, for `threads` threads. Barrier 0 is __syncthreads().
__device__ __forceinline__ void SyncNamed(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- bulk copies ----

// Copies `bytes` consecutive bytes to shared memory, counted at `barrier`. Addresses and `bytes` are
// multiples of 16.
__device__ __forceinline__ void CopyBytesIn(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// ---- bulk tensor copies ----

// Copies the box at column x, row y to shared memory. Its bytes count at `barrier`.
__device__ __forceinline__ void CopyBoxIn(uint32_t to, const CUtensorMap& map, int x, int y,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// Copies the box to the same address in each block of the cluster whose bit is set in `blocks`. In each block
// the bytes count at that block's barrier.
__device__ __forceinline__ void CopyBoxToBlocks(uint32_t to, const CUtensorMap& map, int x, int y,
                                                uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
      : "memory");
}

// Copies a box from shared memory to column x, row y, as one bulk group of this thread.
__device__ __forceinline__ void CopyBoxOut(const CUtensorMap& map, int x, int y, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   reinterpret_cast<uint64_t>(&map)),
               "r"(x), "r"(y), "r"(from)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The same, but adds each element to the element in memory.
__device__ __forceinline__ void AddBoxOut(const CUtensorMap& map, int x, int y, uint32_t from) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   reinterpret_cast<uint64_t>(&map)),
               "r"(x), "r"(y), "r"(from)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's bulk groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void WaitBoxesRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- registers ----
//
// A warpgroup that needs few registers gives some of them back (LowerRegisters), so that another warpgroup of
// the block can have more (RaiseRegisters). kRegisters: registers of a thread afterwards.

template <int kRegisters>
__device__ __forceinline__ void RaiseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void LowerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Stores four 8x8 matrices of 16-bit elements to shared memory. Lane l gives the address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void StoreMatrices(uint32_t row_address, uint32_t m0, uint32_t m1, uint32_t m2,
                                              uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(m0),
               "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

// The same, with each matrix transposed.
__device__ __forceinline__ void StoreMatricesTransposed(uint32_t row_address, uint32_t m0, uint32_t m1,
                                                        uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

__device__ __forceinline__ void StoreFloat(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void StoreWord(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// Loads the word at the same address in block `rank` of the cluster.
__device__ __forceinline__ uint32_t LoadWordOf(uint32_t address, uint32_t rank) {
  uint32_t word;
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %1, %2;"
      "ld.shared::cluster.u32 %0, [remote];}"
      : "=r"(word)
      : "r"(address), "r"(rank)
      : "memory");
  return word;
}

// Stores the low half of `word` to shared memory.
__device__ __forceinline__ void StoreHalf(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(word)) : "memory");
}

// ---- warpgroup matrix products ----

// Which dimension of an operand is contiguous in memory: the inner one, or its rows (A) or columns (B).
enum class Major { kInner, kOuter };

// The descriptor of an operand in shared memory. The operand was stored with the 128-byte swizzle, by copies
// of boxes of 64 elements (128 bytes) of the contiguous dimension. `address` is a multiple of 1024. kInner:
// one line of 128 bytes for each row of A or column of B. kOuter: slabs of 64 rows of A or columns of B; each
// slab has 64 lines, one for each inner element.
template <Major kMajor>
__device__ __forceinline__ uint64_t MatrixDescriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kLineGroupStride = uint64_t{1024 >> 4} << 32;  // 8 lines
  constexpr uint64_t kSlabStride = uint64_t{kMajor == Major::kOuter ? 8192 >> 4 : 1} << 16;
  return kSwizzle128 | kLineGroupStride | kSlabStride | ((address & 0x3ffff) >> 4);
}

// The number that moves a descriptor by 16 elements along the inner dimension when it is added.
template <Major kMajor>
inline constexpr uint64_t kDescriptorStep = kMajor == Major::kOuter ? 16 * 128 >> 4 : 16 * 2 >> 4;

// A warpgroup calls BeginProducts, starts its products, and closes their group with CommitProducts.
// WaitProducts waits until at most kPending groups are not complete. Between BeginProducts and WaitProducts
// no thread may use the accumulator registers.
__device__ __forceinline__ void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WaitProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The rows of one product D [64, 256]. Lane l of warp w of the warpgroup holds elements of two rows of D in
// its array d: of row 16 w + l / 4 in d[4 j] and d[4 j + 1], and of row 16 w + l / 4 + 8 in d[4 j + 2] and
// d[4 j + 3]. The columns of each pair are 8 j + 2 (l % 4) and the next column.
inline constexpr int kProductRows = 64;

// The text and operands of the product instruction; only the types of A and B differ. PTX needs the name of
// every register.
#define LOSSD_WGMMA(types)                                                                                \
  asm volatile(                                                                                           \
      "{.reg .pred p; setp.ne.b32 p, %130, 0;"                                                            \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." types                                                \
      " {"                                                                                                \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                            \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                  \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                  \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                  \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"    \
      "}, %128, %129, p, 1, 1, %131, %132;}"                                                              \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),   \
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),          \
        "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),        \
        "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),        \
        "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),        \
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),        \
        "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),        \
        "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),        \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),        \
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]),        \
        "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]),        \
        "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]),        \
        "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]),        \
        "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]),        \
        "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]),  \
        "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), \
        "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), \
        "+f"(d[127])                                                                                      \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kMajorA == Major::kOuter),                 \
        "n"(kMajorB == Major::kOuter))

// d = (accumulate ? d : 0) + A B for A [64, 16], B [16, 256] of T in shared memory.
template <typename T, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void Mma64x256x16(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    LOSSD_WGMMA("bf16.bf16");
  } else {
    LOSSD_WGMMA("f16.f16");
  }
}

#undef LOSSD_WGMMA

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PTX_CUH_
