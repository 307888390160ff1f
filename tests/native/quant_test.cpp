// Linear layers with ggml's weights: the kernels of the processor this is compiled for against their portable twin, to
// the bit. A program of its own, so that it can be compiled for another processor and run under an emulator. With
// EMULATED_TILES the kernels are those for AMX, on tile instructions in plain C++.
#include <cstdio>
#include <random>
#include <vector>

#include "quant/linear.h"
#if defined(EMULATED_TILES)
#include "emulated_tiles.h"
#endif

using namespace lz;
using namespace lz::quant;

#if defined(EMULATED_TILES)
using Tested = EmulatedTiles;
template <Format F> bool run(const Linear &q) {
  return q.tiles ? run_tiles<EmulatedTiles, F>(q) : run_linear<EmulatedTiles, F>(q);
}
constexpr TileUse USES[] = {NEVER, ALWAYS};
static const char *NAME = "emulated tiles";
#else
using Tested = Isa;
template <Format F> bool run(const Linear &q) { return run_linear<Isa, F>(q); }
constexpr TileUse USES[] = {NEVER, ALWAYS};
static const char *NAME = quant::ISA;
#endif

static int failures = 0, checks = 0;
static std::mt19937 chance(1);

template <class S, Format F> std::vector<float> multiply(const std::vector<uint8_t> &weight, const std::vector<float> &x,
                                                         int64_t rows, int64_t outputs, int64_t inputs, TileUse tiles) {
  const int64_t size = (packed_bytes<S, F>(outputs, inputs) + 63) / 64 * 64;
  void *packed = std::aligned_alloc(64, size);
  pack_all<S, F>(weight.data(), outputs, inputs, packed, 2);
  std::vector<float> out(rows * outputs);
  Linear q{x.data(), packed, nullptr, out.data(), false, rows, inputs, outputs, inputs, 2, read_elements<float>,
           write_results<float>, tiles};
  const bool portable = std::is_same_v<S, Portable>;
  if (!(portable ? run_linear<Portable, F>(q) : run<F>(q))) failures++;
  std::free(packed);
  return out;
}

// One row, of whose groups some are computed side by side, tiles with a rest, a last group and panel that are not full,
// more than one chunk of a panel, wide panels, more than one chunk of rows. Without and with tiles of AMX, where there are
// some.
template <Format F> void compare() {
  const int64_t sizes[][3] = {{1, 300, 512},  {3, 40, 768}, {8, 24, 256}, {13, 70, 2304}, {35, 20, 512 + block_size(F)},
                              {17, 530, 256}, {530, 20, 256}};
  for (const auto &[rows, outputs, inputs] : sizes) {
    std::vector<uint8_t> weight(outputs * inputs / block_size(F) * block_bytes(F));
    for (uint8_t &byte : weight) byte = uint8_t(chance());
    for (size_t i = 0; i < weight.size(); i += block_bytes(F)) {       // scales from 2^-8 to 2^-7
      const size_t d = F == Q6_K ? i + 208 : i;
      weight[d + 1] = 0x1c | (weight[d + 1] & 0x83);
      if (has_min(F)) weight[d + 3] = 0x1c | (weight[d + 3] & 0x83);
    }
    std::vector<float> x(rows * inputs);
    for (float &v : x) v = std::normal_distribution<float>()(chance);
    const std::vector<float> want = multiply<Portable, F>(weight, x, rows, outputs, inputs, NEVER);
    for (TileUse tiles : USES) {
      const std::vector<float> got = multiply<Tested, F>(weight, x, rows, outputs, inputs, tiles);
      for (size_t i = 0; i < got.size(); i++, checks++)
        if (!std::isfinite(want[i]) || std::memcmp(&got[i], &want[i], sizeof(float)))
          if (failures++ < 20)
            std::printf("FAILED format %d (%ld, %ld, %ld) at %zu, %s tiles: got %.9g, want %.9g\n", int(F), long(rows),
                        long(outputs), long(inputs), i, tiles ? "with" : "without", got[i], want[i]);
    }
  }
}

int main() {
  compare<Q4_0>(), compare<Q4_1>(), compare<Q5_0>(), compare<Q5_1>(), compare<Q8_0>();
  compare<Q4_K>(), compare<Q5_K>(), compare<Q6_K>();
  std::printf("%s%s: %d checks, %d failed\n", NAME, tiles_usable<Tested>() ? " + amx" : "", checks, failures);
  return failures != 0;
}
