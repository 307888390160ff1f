// Group norm of images whose channels are adjacent in memory (channels_last). Torch's own path for
// them computes E[x^2] - E[x]^2, which loses the variance if the mean is large; this one subtracts
// the mean first.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "norms.h"

namespace lz {

struct GroupNorm {
  const void *x, *weight, *bias;
  bool has_weight, has_bias;
  void *out;                                    // laid out as x
  int64_t batch, channels, pixels, groups;
  float eps;
  int threads;
};

// Sums of some pixels, for each group: of the numbers, and of their squared distances from the mean
// of these pixels.
struct Moments {
  double sum, squares;
};

template <class T> struct GroupNormer {
  const GroupNorm &a;
  const int64_t size = a.channels / a.groups;
  // Pixels that fit into the first cache: their mean and squares take one pass over memory.
  const int64_t block = std::max<int64_t>(1, 32768 / (a.channels * int64_t(sizeof(T))));
  const int64_t blocks = (a.pixels + block - 1) / block;

  // Calls f(pixels, i, d, n) for each vector of a block, d its first channel: of four pixels at once,
  // whose numbers are at i, i + channels, ..., or of one.
  template <class F> void each_vector(int64_t image, int64_t b, F f) const {
    const int64_t end = std::min((b + 1) * block, a.pixels);
    int64_t p = b * block;
    auto row = [&](auto pixels) {
      const int64_t at = (image * a.pixels + p) * a.channels;
      for_each_vector(a.channels, [&](int64_t d, int n) { f(pixels, at + d, d, n); });
      p += pixels;
    };
    while (p + 4 <= end) row(std::integral_constant<int, 4>{});
    while (p < end) row(std::integral_constant<int, 1>{});
  }

  void measure(int64_t image, int64_t b, float *sums, float *mean, Moments *to) const {
    const T *x = (const T *)a.x;
    const double count = double(std::min(block, a.pixels - b * block)) * size;
    auto add_up = [&](auto f, auto use) {
      std::fill(sums, sums + a.channels, 0.0f);
      each_vector(image, b, [&](auto pixels, int64_t i, int64_t d, int n) {
        vf total = load_n(sums + d, n);
        each<decltype(pixels)::value>([&](auto p) { total += f(load_n(x + i + p * a.channels, n), d, n); });
        store_n(sums + d, total, n);
      });
      for (int64_t g = 0; g < a.groups; g++) {
        double total = 0;
        for (int64_t d = g * size; d < (g + 1) * size; d++) total += sums[d];
        use(g, total);
      }
    };
    add_up([](vf v, int64_t, int) { return v; }, [&](int64_t g, double total) {
      to[g].sum = total;
      std::fill(mean + g * size, mean + (g + 1) * size, float(total / count));
    });
    add_up([&](vf v, int64_t d, int n) {
      v -= load_n(mean + d, n);
      return v * v;
    }, [&](int64_t g, double total) { to[g].squares = total; });
  }

  // Mean, factor and shift of each channel, from the moments of all blocks.
  template <class P> void combine(const Moments *of, float *mean, float *factor, float *shift) const {
    const double count = double(a.pixels) * size;
    for (int64_t g = 0; g < a.groups; g++) {
      double total = 0, squares = 0;
      for (int64_t b = 0; b < blocks; b++) total += of[b * a.groups + g].sum;
      const double m = total / count;
      for (int64_t b = 0; b < blocks; b++) {
        const double n = double(std::min(block, a.pixels - b * block)) * size;
        const double apart = of[b * a.groups + g].sum / n - m;
        squares += of[b * a.groups + g].squares + n * apart * apart;
      }
      for (int64_t d = g * size; d < (g + 1) * size; d++) {
        mean[d] = float(m), factor[d] = float(1.0 / std::sqrt(squares / count + a.eps));
        if (a.has_weight) factor[d] *= to_float(((const P *)a.weight)[d]);
        shift[d] = a.has_bias ? to_float(((const P *)a.bias)[d]) : 0.0f;
      }
    }
  }

  template <class P> bool run() const {
    const int threads = a.batch * a.channels * a.pixels < 32768 ? 1 : a.threads;
    const int64_t row = 3 * a.channels;         // mean, factor and shift of an image
    const size_t bytes = sizeof(Moments) * a.batch * blocks * a.groups + sizeof(float) * row * (a.batch + threads);
    Moments *moments = (Moments *)std::malloc(bytes);
    if (!moments) return false;
    float *images = (float *)(moments + a.batch * blocks * a.groups), *scratch = images + row * a.batch;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < a.batch * blocks; i++) {
      float *own = scratch + row * thread_number();
      measure(i / blocks, i % blocks, own, own + a.channels, moments + i * a.groups);
    }
    for (int64_t i = 0; i < a.batch; i++) {
      float *mean = images + row * i;
      combine<P>(moments + i * blocks * a.groups, mean, mean + a.channels, mean + 2 * a.channels);
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < a.batch * blocks; i++) {
      const float *mean = images + row * (i / blocks), *factor = mean + a.channels, *shift = factor + a.channels;
      each_vector(i / blocks, i % blocks, [&](auto pixels, int64_t at, int64_t d, int n) {
        const vf m = load_n(mean + d, n), by = load_n(factor + d, n), plus = load_n(shift + d, n);
        each<decltype(pixels)::value>([&](auto p) {
          const int64_t j = at + p * a.channels;
          store_n((T *)a.out + j, (load_n((const T *)a.x + j, n) - m) * by + plus, n);
        });
      });
    }
    std::free(moments);
    return true;
  }
};

template <class T, class P> bool run_group_norm(const GroupNorm &a) { return GroupNormer<T>{a}.template run<P>(); }

}  // namespace lz
