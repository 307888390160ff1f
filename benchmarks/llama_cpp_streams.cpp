// How fast memory is read by one thread and by two, and one row of x multiplied with ggml's weights: with other numbers of
// groups of rows side by side (streams) and of bytes fetched before they are loaded (AHEAD); "4/8k" are 4 and 8 KiB.
//
//   g++ -O3 -std=c++17 -march=native -pthread -I src/layerzero/backends/native llama_cpp_streams.cpp -o streams
//   taskset -c 4,6 ./streams [seconds of each turn] [MiB of all copies of a weight]
//
// JSON, one line per figure. Variants take turns; GB/s are medians, of packed bytes for weights. "cached": of a weight
// that lies in the L2 cache, which is what the arithmetic alone allows.

#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "quant/linear.h"

using namespace lz;
using namespace lz::quant;

namespace {

constexpr int ROUNDS = 5;
double turn = 0.03;
int64_t copies_bytes = 512 << 20;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// By assembly, as GCC drops calls of functions that only have builtin prefetches.
template <int CACHE> INLINE inline void prefetch(const void *p) {
  const char &at = *(const char *)p;
#if defined(__x86_64__)
  if constexpr (CACHE == 1) asm volatile("prefetcht0 %0" ::"m"(at));
  else asm volatile("prefetcht1 %0" ::"m"(at));
#elif defined(__aarch64__)
  if constexpr (CACHE == 1) asm volatile("prfm pldl1keep, %0" ::"Q"(at));
  else asm volatile("prfm pldl2keep, %0" ::"Q"(at));
#endif
}

template <int STREAMS, int AHEAD_, int CACHE = 2> struct Variant : Isa {
  static constexpr int AHEAD = AHEAD_;
  static constexpr int streams(Format f) { return super_blocks(f) ? 1 : STREAMS; }
  INLINE static void fetch(const void *p) { prefetch<CACHE>(p); }
};

uint8_t *pages(int64_t bytes) {
  void *p = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) std::exit(1);
  madvise(p, size_t(bytes), MADV_HUGEPAGE);
  return (uint8_t *)p;
}

struct Entry {
  std::string name;
  std::function<int64_t()> run;                 // returns the bytes that were read
  std::vector<double> rates = {};
};

void race(std::vector<Entry> &entries, const char *format, const char *shape, int threads) {
  for (auto &e : entries) e.run();
  for (int round = 0; round < ROUNDS; round++)
    for (auto &e : entries) {
      int64_t bytes = 0;
      const double start = now();
      while (now() - start < turn) bytes += e.run();
      e.rates.push_back(double(bytes) / (now() - start) / 1e9);
    }
  for (auto &e : entries) {
    std::sort(e.rates.begin(), e.rates.end());
    std::printf("{\"what\": \"%s\", \"shape\": \"%s\", \"threads\": %d, \"variant\": \"%s\", \"gb_s\": %.2f}\n", format, shape,
                threads, e.name.c_str(), e.rates[ROUNDS / 2]);
  }
  std::fflush(stdout);
}

// Reads `bytes` from `p` on as N streams side by side; each fetches AHEAD bytes before it loads.
template <int N, int AHEAD> int64_t read_streams(const uint8_t *p, int64_t bytes) {
  typename Isa::I sums[N];
  each<N>([&](auto n) { sums[n] = Isa::nothing(); });
  const int64_t each_bytes = bytes / N / 256 * 256;
  constexpr int64_t WIDTH = sizeof(typename Isa::I);
  for (int64_t i = 0; i < each_bytes; i += 256)
    each<N>([&](auto n) {
      const uint8_t *at = p + n * each_bytes + i;
      if constexpr (AHEAD > 0) each<4>([&](auto j) { prefetch<2>(at + AHEAD + 64 * j); });
      each<256 / WIDTH>([&](auto j) { sums[n] = Isa::add(sums[n], Isa::load_i((const int32_t *)(at + WIDTH * j))); });
    });
  alignas(64) int32_t out[64];
  for (const auto &sum : sums) {                // used, as far as the compiler knows
    Isa::store_i(out, sum);
    asm volatile("" ::"r"(out) : "memory");
  }
  return N * each_bytes;
}

void race_reads(int threads) {
  static uint8_t *memory = [] {
    uint8_t *p = pages(copies_bytes);
    std::memset(p, 1, size_t(copies_bytes));
    return p;
  }();
  constexpr int64_t PIECE = 1 << 18;
  auto entry = [&](const char *name, int64_t (*read)(const uint8_t *, int64_t)) {
    return Entry{name, [=] {
      static int64_t at = 0;
      const int64_t part = std::min<int64_t>(copies_bytes, 32 << 20), first = at;
      at = (at + part) % copies_bytes;
      share(threads, part / PIECE, [&](int64_t i, int) { read(memory + first + i * PIECE, PIECE); });
      return part;
    }};
  };
  std::vector<Entry> entries = {
      entry("1 stream", read_streams<1, 0>),          entry("2 streams", read_streams<2, 0>),
      entry("4 streams", read_streams<4, 0>),         entry("8 streams", read_streams<8, 0>),
      entry("1 stream, 8 KiB ahead", read_streams<1, 8192>), entry("4 streams, 2 KiB ahead", read_streams<4, 2048>),
      entry("4 streams, 4 KiB ahead", read_streams<4, 4096>), entry("8 streams, 2 KiB ahead", read_streams<8, 2048>)};
  race(entries, "read", "", threads);
}

template <Format F> struct Case {
  int64_t outputs, inputs, count, bytes;
  uint8_t *packed;
  std::vector<float> x, out;

  Case(int64_t outputs, int64_t inputs, int64_t most) : outputs(outputs), inputs(inputs), x(size_t(inputs)), out(size_t(outputs)) {
    std::mt19937 random(1);
    std::vector<uint8_t> blocks(size_t(outputs * inputs / block_size(F) * block_bytes(F)));
    for (auto &b : blocks) b = uint8_t(random());
    for (size_t i = 0; i < blocks.size(); i += block_bytes(F)) {       // scales that are small numbers
      uint8_t *scales = &blocks[i] + (F == Q6_K ? block_bytes(F) - 2 : 0);
      scales[1] = 0x1c;
      if (has_min(F)) scales[3] = 0x1c;
    }
    for (auto &v : x) v = float(int(random() % 2001) - 1000) / 500;
    bytes = packed_bytes<Isa, F>(outputs, inputs);
    count = std::max<int64_t>(1, most / bytes);
    packed = pages(count * bytes);
    pack_all<Isa, F>(blocks.data(), outputs, inputs, packed, 1);
    for (int64_t i = 1; i < count; i++) std::memcpy(packed + i * bytes, packed, size_t(bytes));
  }
  ~Case() { munmap(packed, size_t(count * bytes)); }

  template <class S> Entry entry(const char *name, int threads) {
    return {name, [=, at = int64_t(0)]() mutable {
      Linear q{x.data(), packed + at++ % count * bytes, nullptr, out.data(), false, 1, inputs, outputs, inputs, threads,
               read_elements<float>, write_results<float>};
      if (!run_few<S, F>(&q, 1)) std::exit(1);
      return bytes;
    }};
  }

  void run(const char *format, const char *shape) {
    for (int threads = 1; threads <= 2; threads++) {
      std::vector<Entry> entries = {
          entry<Variant<1, 0>>("1/0", threads), entry<Variant<1, 8192>>("1/8k", threads),
          entry<Variant<1, 16384>>("1/16k", threads), entry<Variant<1, 32768>>("1/32k", threads)};
      if constexpr (!super_blocks(F))
        for (auto &e : {entry<Variant<4, 0>>("4/0", threads), entry<Variant<4, 8192>>("4/8k", threads),
                        entry<Variant<4, 16384>>("4/16k", threads), entry<Variant<8, 16384>>("8/16k", threads)})
          entries.push_back(e);
      std::vector<float> first;
      for (auto &e : entries) {
        e.run();
        if (first.empty()) first = out;
        if (std::memcmp(first.data(), out.data(), out.size() * sizeof(float))) std::printf("%s %s: other bits\n", format, e.name.c_str());
      }
      race(entries, format, shape, threads);
    }
  }
};

template <Format F> void race_format(const char *name) {
  Case<F>(512, F == Q8_0 ? 1024 : 2048, 1).run(name, "cached");
  Case<F>(4096, 4096, copies_bytes).run(name, "4096x4096");
  if (F == Q4_1) Case<F>(1536, 576, copies_bytes).run(name, "1536x576");
  if (F == Q4_0 || F == Q4_K) Case<F>(4096, 14336, copies_bytes).run(name, "4096x14336");
}

}  // namespace

int main(int argc, char **argv) {
  if (argc > 1) turn = std::atof(argv[1]);
  if (argc > 2) copies_bytes = int64_t(std::atoi(argv[2])) << 20;
  race_reads(1), race_reads(2);
  race_format<Q4_0>("q4_0"), race_format<Q4_1>("q4_1"), race_format<Q8_0>("q8_0");
  race_format<Q4_K>("q4_k"), race_format<Q6_K>("q6_k");
}
