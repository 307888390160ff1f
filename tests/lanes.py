"""What `make test` leaves to the nightly lanes, each beside what it keeps of the same behaviour.

LZ_TEST_FULL=1 runs all of it, and so does naming a file or giving -k.
"""

from __future__ import annotations

import os

import pytest

# Folder of tests/ -> the tests that only the nightly lanes run. The parameters of a test that is
# named with some of them are left out alone: the others stay. "*" stands for any letters.
LONG: dict[str, tuple[str, ...]] = {
    # the build by a plain compiler has the same code for narrow vectors; quantized weights have
    # emulated tiles, and here their own vectors
    "native": ("test_cross_compiled.py::test_kernels[x86-64]",
               "test_cross_compiled.py::test_kernels[quantized x86-64 AVX2]"),
    # of the shapes stay: the smallest, codes of both kinds, wide heads, one loop, a window
    "emulator": (
        *(f"test_step_emulated.py::test_a_token[shape{n}-" for n in (2, 4, 5, 6, 7, 9, 10)),
        "test_sample_emulated.py::test_contract[float32-cases0]",     # in bfloat16
        "test_grouped_emulated.py::test_contract[config1]",
        "test_replay_emulated.py::test_keys_that_grow_in_a_cache_of_fixed_strides[bshd]"),
    # the emulator has the same step in CUDA, and the tests of the step in torch are all here
    "hf": (
        *(f"test_speculation.py::test_whole_rounds_where_the_step_is_captured[{model}-{draft}-{how}]"
          for model, draft in (("llama", "lookup"), ("llama", "same"), ("gpt2", "other"),
                               ("qwen3", "other"), ("gemma2", "other"))
          for how in ("Always-0", "Turns-2")),
        # the interpreter has the contracts of the same kernels, a GPU these modules
        "test_accelerate.py::test_the_device_kernels_agree_in_the_interpreter",
        "test_accelerate.py::test_the_benchmark_runs"),
    # another call is compiled
    "contract": (
        "test_contract.py::test_kernel_keeps_the_contract[torch.flex-bfloat16-",),
    "hub_kernels": ("test_hub_load.py::test_two_compiled_versions_side_by_side",),
    # another fault of the same kind is planted
    "faults": (
        *(f"test_model_size_faults.py::test_pages_beyond_small_integers_are_a_matter_of_size[{name}]"
          for name in ("page_ids_in_15_bits", "latent_pages_in_15_bits")),
        *(f"test_symptom_faults.py::test_it_is_named_rightly_or_not_at_all[{name}]"
          for name in ("padded_steps_decay_the_last_state", "pages_as_if_dense")),
        "test_size_range_faults.py::test_sizes_of_every_range_are_called"
        "[parts_of_four_million_numbers_but_the_last]",
        "test_size_range_faults.py::test_widths_of_models_are_called[paged_attention]",
        "test_call_faults.py::test_it_is_found_and_named_rightly_or_not_at_all[scoresforeverytotal]",
        *(f"test_meeting_faults.py::test_it_is_named_rightly[{name}]"
          for name in ("the_residual_is_written_over_the_target", "distances_have_16_bits",
                       "values_are_found_among_scaled_keys")),
        # other seeds
        *("test_index_faults.py::test_a_kernel_of_few_queries_and_shared_heads_is_met_past_16_bits"
          f"[attention_decode{kind}-{seed}]" for kind in ("", "_rows") for seed in (1, 2)),
        *(f"test_index_faults.py::test_a_position_is_met_past_16_bits[{name}-1]"
          for name in ("attention_key_positions_in_signed_16_bits", "softcap_is_left_out_past_15_bits",
                       "window_of_a_context_in_16_bits", "key_positions_in_unsigned_16_bits")),
        "test_index_faults.py::test_long_calls_are_met_by_the_cases_of_their_op"
        "[ids_of_the_history_in_16_bits]"),
    # each model with each kind of cache has another of these windows or dtypes
    "models": (
        *(f"test_decoders.py::test_prefill_and_greedy_decode[{shape}-1024-*-paged]"
          for shape in ("llama", "gpt", "moe", "mla")),
        *(f"test_decoders.py::test_other_ways_to_keep_the_past[gpt-{dtype}-*]"
          for dtype in ("bfloat16", "float16"))),
    "integration": ("test_ranks.py::test_ranks_agree[2]",
                    # broken plugins are refused, a sound one is used
                    "test_plugin.py::test_upgrade_and_downgrade"),
    # the other path of a call, or the other signal
    "stress": (
        "test_load.py::test_a_hundred_threads_over_mixed_shapes_while_the_world_changes[python]",
        "test_load.py::test_a_hundred_threads_each_with_a_preference_of_its_own[python]",
        "test_load.py::test_a_flood_of_shapes_keeps_the_cache_and_the_memory_bounded[python]",
        "test_fork.py::test_children_forked_in_the_middle_of_everything[python]",
        "test_soak.py::test_an_interrupted_soak_leaves_its_report[SIGTERM]"),
    "pipelines": ("test_diffusers.py::test_the_denoiser_compiles_as_one_graph[sd15]",),
    "unit": (
        # `make test` compiles it before the tests, tests/native for every instruction set
        "dispatch/test_native_build.py::test_a_real_build",
        "dispatch/test_bounded.py::test_rules_beyond_the_bound_are_obeyed[native]",
        "dispatch/test_bounded.py::test_policies_with_ever_new_rules[python]",
        "operate/test_recording.py::test_a_program_is_recorded_from_its_first_call[0]",
        "cli/test_commands.py::test_a_reader_that_went_away_ends_the_command_without_a_word[stderr]",
        # tests/native has a build for every instruction set
        "backends/test_native_kernels.py::test_a_compiler_without_openmp_or_wide_vectors_will_do",
        "machine/test_watchdog.py::test_what_hangs_is_stopped_with_all_it_started",
        "house/test_docs.py::test_the_examples_of_a_page_run[tuning]",
        "verify/test_definitions.py::test_a_reference_that_is_kept_waiting_has_more_time",
        "verify/test_diagnosis_reruns.py::test_what_is_wrong_where_one_size_exceeds_another_is_no_"
        "matter_of_a_size",
        "backends/test_ggml_kernels.py::test_compilers_keep_what_is_fetched_ahead[Q4_0]",
        # with quick cells the gate has tests; that certificates hold, tests/faults/test_certify.py
        "release/test_gate.py::test_without_quick_a_kernel_is_verified_once_and_then_its_"
        "certificate_holds",
        # test_bounded.py counts what thousands of calls leave
        "ops/test_grouped_flash_attention_stress.py::TestGroupedFlashAttentionMemoryPressure::"
        "test_repeated_calls_no_memory_leak",
        # tests/contract has the same cases in every dtype; what is counted here, in two
        "backends/test_native_kernels.py::test_every_case_of_the_contract[*-bfloat16]",
        # the same kernels once more, unnamed
        "verify/test_ladder.py::test_a_planted_kernel_is_found_and_named[*-]",
        # damages drawn by other seeds, and two of three bytes
        *("perf/test_store_damage.py::test_no_damage_fails_a_call_or_is_believed_or_loses_what_is_"
          f"measured[{seed}]" for seed in range(4, 12)),
        *(f"perf/test_store_damage.py::test_every_byte_of_the_header[{n}]"
          for n in range(100) if n % 3)),
}


def leave_to_the_nightly_lanes(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (os.environ.get("LZ_TEST_FULL") == "1" or config.option.keyword
            or any(".py" in argument for argument in config.args)):
        return
    left_out = {item for item in items if is_long(item.nodeid)}
    config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
    items[:] = [item for item in items if item not in left_out]


def is_long(test: str) -> bool:
    _, _, inside = test.partition("tests/")
    folder, _, name = inside.partition("/")
    return any(name.startswith(start) and name.endswith(end)
               for start, _, end in (test.partition("*") for test in LONG.get(folder, ())))
