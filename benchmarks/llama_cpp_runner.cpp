// llama.cpp as a program: what llama_cpp_runner.py does, without Python, for machines where no wheel runs.
//
//   g++ -O2 -std=c++17 -rdynamic -I llama.cpp/include -I llama.cpp/ggml/include llama_cpp_runner.cpp
//       -L BUILD/bin -lllama -lggml -lggml-base -Wl,-rpath,'$ORIGIN' -o BUILD/bin/llama_cpp_runner
//   llama_cpp_runner MODEL THREADS CONTEXT
//
// A request per line of stdin, an answer per line of stdout, both JSON: `prompt` (ids), `count` (tokens to generate,
// greedy), `top` (likeliest ids to list with their log probabilities), `cpu_time` (whether rates are of CPU time).
// A crash prints a backtrace.

#include <execinfo.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace {

void print_backtrace(int number) {
  void *frames[64];
  const char *name = strsignal(number);
  if (write(2, name, strlen(name)) + write(2, "\n", 1) > 0) backtrace_symbols_fd(frames, backtrace(frames, 64), 2);
  signal(number, SIG_DFL);
  raise(number);
}

// What is logged while a token is computed would count as llama.cpp's time.
void log_above(ggml_log_level level, const char *text, void *least) {
  if (level >= *(ggml_log_level *)least && level != GGML_LOG_LEVEL_CONT) std::fputs(text, stderr);
}

double seconds(bool of_cpu) {
  timespec now;
  clock_gettime(of_cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

long resident() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmRSS:", 0) == 0) return std::atol(line.c_str() + 6) << 10;
  return 0;
}

// What follows "key": in a request, whose keys are known and whose values are flat.
const char *value_of(const std::string &request, const char *key) {
  const size_t at = request.find("\"" + std::string(key) + "\":");
  if (at == std::string::npos) return "";
  const char *value = request.c_str() + at + strlen(key) + 3;
  return value + strspn(value, " ");
}

std::vector<llama_token> ids_of(const char *list) {
  std::vector<llama_token> ids;
  for (char *end; *list && *list != ']'; list = end + strspn(end, ", ")) {
    list += strspn(list, "[ ");
    ids.push_back(llama_token(std::strtol(list, &end, 10)));
    if (end == list) return {};
  }
  return ids;
}

// [[id, log probability], ...] of the `count` likeliest.
std::string likeliest(const float *logits, int vocab, int count) {
  std::vector<int> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  double total = 0;
  for (int i = 0; i < vocab; i++) total += std::exp(double(logits[i]) - logits[order[0]]);
  std::string text = "[";
  for (int i = 0; i < count; i++) {
    char pair[64];
    std::snprintf(pair, sizeof pair, "%s[%d,%.9g]", i ? "," : "", order[i], logits[order[i]] - logits[order[0]] - std::log(total));
    text += pair;
  }
  return text + "]";
}

[[noreturn]] void fail(const char *what) {
  std::fprintf(stderr, "llama_cpp_runner: %s\n", what);
  std::exit(1);
}

void answer(llama_context *context, int vocab, const std::string &request) {
  std::vector<llama_token> prompt = ids_of(value_of(request, "prompt"));
  const int count = std::atoi(value_of(request, "count")), top = std::min(vocab, std::atoi(value_of(request, "top")));
  const bool of_cpu = !strncmp(value_of(request, "cpu_time"), "true", 4);
  if (prompt.empty()) fail("a request without a prompt");
  auto decode = [&](llama_token *ids, size_t length) {
    if (llama_decode(context, llama_batch_get_one(ids, int32_t(length)))) fail("llama_decode failed");
    llama_synchronize(context);
  };
  llama_memory_clear(llama_get_memory(context), true);
  std::string tokens, tops;
  const double start = seconds(of_cpu);
  decode(prompt.data(), prompt.size());
  const double middle = seconds(of_cpu);
  for (int step = 0; step < count; step++) {
    const float *logits = llama_get_logits_ith(context, -1);
    llama_token token = llama_token(std::max_element(logits, logits + vocab) - logits);
    if (top) tops += (step ? "," : "") + likeliest(logits, vocab, top);
    tokens += (step ? "," : "") + std::to_string(token);
    if (step + 1 < count) decode(&token, 1);
  }
  const double end = seconds(of_cpu);
  std::printf("{\"tokens\": [%s], \"top\": [%s], \"prompt_rate\": %.6g, \"decode_rate\": %.6g, \"rss\": %ld}\n",
              tokens.c_str(), tops.c_str(), double(prompt.size()) / (middle - start),
              count > 1 ? (count - 1) / (end - middle) : 0.0, resident());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 4) fail("give MODEL THREADS CONTEXT");
  for (int number : {SIGSEGV, SIGILL, SIGBUS, SIGFPE, SIGABRT}) signal(number, print_backtrace);
  static ggml_log_level least = GGML_LOG_LEVEL_INFO;
  llama_log_set(log_above, &least);
  ggml_backend_load_all();
  llama_backend_init();
  llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (!model) fail("the model cannot be loaded");
  llama_context_params params = llama_context_default_params();
  params.n_ctx = params.n_batch = uint32_t(std::atoi(argv[3]));
  params.n_threads = params.n_threads_batch = std::atoi(argv[2]);
  llama_context *context = llama_init_from_model(model, params);
  if (!context) fail("no context");
  std::fprintf(stderr, "%s\n", llama_print_system_info());
  least = GGML_LOG_LEVEL_WARN;
  std::printf("{\"times_cpu\": true}\n");
  std::fflush(stdout);
  const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  for (std::string request; std::getline(std::cin, request);) answer(context, vocab, request);
  llama_free(context);
  llama_model_free(model);
}
