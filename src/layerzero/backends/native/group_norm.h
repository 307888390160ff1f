// Group norm of images whose channels are adjacent in memory (channels_last). Torch's own path for
// them computes E[x^2] - E[x]^2, which loses the variance if the mean is large; this one subtracts
// about the mean first.
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
  // Pixels that stay near: their mean and squares take one pass over memory.
  const int64_t block = std::max<int64_t>(1, 65536 / (a.channels * int64_t(sizeof(T))));
  const int64_t blocks = (a.pixels + block - 1) / block;

  // The first number of a block, and how many pixels it has.
  const T *start(const T *x, int64_t image, int64_t b) const { return x + (image * a.pixels + b * block) * a.channels; }
  int64_t length(int64_t b) const { return std::min(block, a.pixels - b * block); }

  // Sums of x - from and of its square over a block, for each channel; of four pixels at once, so
  // that the sums are read and written once for four numbers.
  void add_up(const T *x, int64_t pixels, const float *from, float *sums, float *squares) const {
    const int64_t channels = a.channels;
    std::fill(sums, sums + channels, 0.0f), std::fill(squares, squares + channels, 0.0f);
    auto add = [&](auto count) INLINE {
      for_each_vector(channels, [&](int64_t d, int n) INLINE {
        const vf less = load_n(from + d, n);
        vf total = load_n(sums + d, n), squared = load_n(squares + d, n);
        each<decltype(count)::value>([&](auto i) INLINE {
          const vf v = load_n(x + i * channels + d, n) - less;
          total += v, squared += v * v;
        });
        store_n(sums + d, total, n), store_n(squares + d, squared, n);
      });
      x += count * channels, pixels -= count;
    };
    while (pixels >= 4) add(std::integral_constant<int, 4>{});
    while (pixels > 0) add(std::integral_constant<int, 1>{});
  }

  // One pass over a block, its numbers taken from about their mean: that of a few of its pixels. Where
  // that is far off, which would cost digits of the variance, another pass takes them from the mean.
  void measure(int64_t image, int64_t b, float *sums, float *squares, float *from, Moments *to) const {
    const T *x = start((const T *)a.x, image, b);
    const int64_t pixels = length(b);
    const double count = double(pixels) * size;
    const int64_t few = std::min<int64_t>(pixels, 8), apart = pixels / few * a.channels;
    for (int64_t g = 0; g < a.groups; g++) {
      double total = 0;
      for (int64_t i = 0; i < few; i++)
        for (int64_t d = g * size; d < (g + 1) * size; d++) total += to_float(x[i * apart + d]);
      std::fill(from + g * size, from + (g + 1) * size, float(total / double(few * size)));
    }
    bool far_off = true;
    for (int pass = 0; pass < 2 && far_off; pass++) {
      far_off = false;
      add_up(x, pixels, from, sums, squares);
      for (int64_t g = 0; g < a.groups; g++) {
        double total = 0, squared = 0;
        for (int64_t d = g * size; d < (g + 1) * size; d++) total += sums[d], squared += squares[d];
        const double excess = total * total / count, shift = from[g * size];
        to[g] = {shift * count + total, std::max(squared - excess, 0.0)};
        if (excess > to[g].squares) {          // by more than the standard deviation
          far_off = true;
          std::fill(from + g * size, from + (g + 1) * size, float(shift + total / count));
        }
      }
    }
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
        shift[d] = (a.has_bias ? to_float(((const P *)a.bias)[d]) : 0.0f) + float(mean[d] - m) * factor[d];
      }
    }
  }

  // Pixel by pixel: a processor passes a line that is written from end to end to memory unread,
  // and it sees that of one row at a time only.
  void normalize(int64_t image, int64_t b, const float *mean, const float *factor, const float *shift) const {
    const int64_t channels = a.channels, count = length(b) * channels;
    const T *x = start((const T *)a.x, image, b);
    T *out = (T *)a.out + (x - (const T *)a.x);
    for (int64_t p = 0; p < count; p += channels)
      for_each_vector(channels, [&](int64_t d, int n) INLINE {
        const vf from = load_n(mean + d, n), by = load_n(factor + d, n), plus = load_n(shift + d, n);
        store_n(out + p + d, (load_n(x + p + d, n) - from) * by + plus, n);
      });
  }

  using Combine = void (GroupNormer::*)(const Moments *, float *, float *, float *) const;
  bool run(Combine combine) const {
    const int threads = a.batch * a.channels * a.pixels < 32768 ? 1 : a.threads;
    const int64_t row = 3 * a.channels;         // mean, factor and shift of an image
    const size_t bytes = sizeof(Moments) * a.batch * blocks * a.groups + sizeof(float) * row * (a.batch + threads);
    Moments *moments = (Moments *)std::malloc(bytes);
    if (!moments) return false;
    float *images = (float *)(moments + a.batch * blocks * a.groups), *scratch = images + row * a.batch;
    share(threads, a.batch * blocks, [&](int64_t i, int thread) {
      float *own = scratch + row * thread;
      measure(i / blocks, i % blocks, own, own + a.channels, own + 2 * a.channels, moments + i * a.groups);
    });
    for (int64_t i = 0; i < a.batch; i++) {
      float *mean = images + row * i;
      (this->*combine)(moments + i * blocks * a.groups, mean, mean + a.channels, mean + 2 * a.channels);
    }
    share(threads, a.batch * blocks, [&](int64_t i, int) {
      const float *mean = images + row * (i / blocks);
      normalize(i / blocks, i % blocks, mean, mean + a.channels, mean + 2 * a.channels);
    });
    std::free(moments);
    return true;
  }
};

template <class T, class P> bool run_group_norm(const GroupNorm &a) {
  return GroupNormer<T>{a}.run(&GroupNormer<T>::template combine<P>);
}

}  // namespace lz
