"""One short example for each public name that is no operation; a test runs every one of them.

They go into the generated stubs and docs/reference/api.md. Each starts with `torch` and `lz`
imported, in an empty folder. Examples of operations are made from their cases.
"""

LLAMA = '''from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                                     num_attention_heads=4, num_key_value_heads=2, vocab_size=99))
'''
CALLS = 'calls = lz.testing.calls_for("rms_norm", arguments={"x": torch.ones(8, 64)})\n'

WORDS = ('from tokenizers import Tokenizer, models\n'
         'words = Tokenizer(models.WordLevel({"hello": 0}, unk_token="hello"))\n')
FAST = (WORDS + 'from transformers import PreTrainedTokenizerFast\n'
        'fast = PreTrainedTokenizerFast(tokenizer_object=words)\n')

ALONE = ('from torch.distributed import HashStore  # type: ignore[attr-defined]\n'
         'lz.distributed.init(group=lz.distributed.StoreGroup(HashStore(), 0, 1))\n')
END = '\nlz.distributed.shutdown()'

EXAMPLES = {
    # classes
    "Code": 'assert lz.Code.NOT_INSTALLED.category.value == "software"',
    "Device": 'plan = lz.explain("rms_norm", torch.ones(2, 8), on=lz.doctor().devices[0])',
    "Kernel":
        'lz.register(lz.Kernel("mine.norm", lz.op("rms_norm"), lambda: '
        'lz.op("rms_norm").reference))',
    "Op": 'op: lz.Op = lz.op("rms_norm")\nvalues = op.inputs(**op.cases[0])',
    "Plan": 'plan: lz.Plan = lz.explain("rms_norm", torch.ones(2, 8))\nprint(plan.kernel, '
            'plan.rejected)',
    "PolicyRule": 'lz.configure(rules=(lz.PolicyRule.of("deny", "triton.*", "rms_norm"),))',
    "Reason": 'reasons: tuple[lz.Reason, ...] = lz.explain("rms_norm", torch.ones(2, '
              '8)).rejected[0].reasons',
    "SelectionReport": 'report: lz.SelectionReport = lz.explain("rms_norm", torch.ones(2, 8))\n'
                       'print(report.transform_cost_total, report.fused_ops)',
    "Tolerance": 'assert isinstance(lz.op("rms_norm").tolerance, lz.Tolerance)',
    # ask
    "doctor": 'print(lz.doctor())',
    "explain": 'print(lz.explain("rms_norm", torch.ones(2, 8)))',
    "list_kernels": 'ready = [row.id for row in lz.list_kernels("attention") if row.status == '
                    '"ready"]',
    "op": 'contract = lz.op("attention")',
    "select": 'plan = lz.select("rms_norm", torch.ones(2, 8))',
    "stats": 'print(lz.stats().calls)',
    "subscribe": 'stop = lz.subscribe(print)\nstop()',
    "validate": 'reasons = lz.validate("rms_norm", "torch.rms_norm", torch.ones(2, 8))',
    "which": 'kernel = lz.which("rms_norm", torch.ones(2, 8))',
    # decide
    "clear_cache": 'lz.clear_cache()',
    "configure": 'lz.configure(deterministic=True)',
    "disabled": 'with lz.disabled():\n    out = lz.rms_norm(torch.ones(2, 8))',
    "get_config": 'settings = lz.get_config()["settings"]',
    "get_locks": 'locks = lz.get_locks()',
    "load_config": 'open("policy.yaml", "w").write(\'rules: [{deny: '
                   '"triton.*"}]\')\nlz.load_config("policy.yaml")',
    "lock": 'lz.lock("rms_norm", "torch.rms_norm")',
    "prefer": 'with lz.prefer("reference"):\n    out = lz.rms_norm(torch.ones(2, 8))',
    "reload": 'lz.reload()',
    "unlock": 'lz.lock("rms_norm", "torch.rms_norm")\nlz.unlock("rms_norm")',
    # ranks
    "distributed.Agreement": ALONE + 'agreed: lz.distributed.Agreement | None = '
                             'lz.distributed.status()' + END,
    "distributed.StoreGroup": 'from torch.distributed import HashStore  # type: ignore[attr-defined]\n'
                              'group = lz.distributed.StoreGroup(HashStore(), rank=0, size=1)',
    "distributed.agree": CALLS + ALONE + 'lz.distributed.agree(calls)' + END,
    "distributed.parallel_attention":
        'q, k = torch.ones(1, 16, 4, 32), torch.ones(1, 8, 4, 32)\n'
        'out = lz.distributed.parallel_attention(q, k, k, is_causal=True)',
    "distributed.check": ALONE + 'lz.distributed.check()' + END,
    "distributed.column_linear": 'out = lz.distributed.column_linear(torch.ones(2, 64), '
                                 'torch.ones(128, 64))',
    "distributed.parallel_embedding":
        'rows = lz.distributed.parallel_embedding(torch.tensor([1, 2]), torch.ones(9, 64))',
    "distributed.init": ALONE + 'lz.distributed.shutdown()',
    "distributed.parallel_mlp": 'x, wide = torch.ones(2, 64), torch.ones(128, 64)\n'
                       'out = lz.distributed.parallel_mlp(x, wide, wide, torch.ones(64, 128))',
    "distributed.row_linear": 'out = lz.distributed.row_linear(torch.ones(2, 64), '
                              'torch.ones(32, 64))',
    "distributed.shard": 'own = lz.distributed.shard(torch.ones(64, 128), dim=1)',
    "distributed.shutdown": ALONE + 'lz.distributed.shutdown()',
    "distributed.status": 'assert lz.distributed.status() is None      # before init',
    "distributed.sync": ALONE + 'lz.rms_norm(torch.ones(2, 8))\nlz.distributed.sync()' + END,
    # add
    "register": 'kernel = lz.Kernel("mine.norm", lz.op("rms_norm"), lambda: '
                'lz.op("rms_norm").reference)\n'
                'lz.register(kernel)',
    "unregister": 'kernel = lz.Kernel("mine.norm", lz.op("rms_norm"), lambda: '
                  'lz.op("rms_norm").reference)\n'
                  'lz.register(kernel)\nlz.unregister("mine.norm")',
    # measure and prepare
    "compile": 'model = lz.compile(lambda x: lz.rms_norm(x), torch.ones(2, 8))\nout = '
               'model(torch.ones(2, 8))',
    "dry_run": 'print(lz.dry_run(lambda x: lz.rms_norm(x), torch.ones(2, 8)))',
    "readiness_check": CALLS + 'assert lz.readiness_check(calls, device="cpu").ok',
    "recording": 'with lz.recording() as recorder:\n    lz.rms_norm(torch.ones(2, 8))\n'
                 'print(recorder.calls)',
    "tune": CALLS + 'report = lz.tune(calls, device="cpu", rounds=5, compile=False)',
    "warmup": CALLS + 'report = lz.warmup(calls, device="cpu")',
    # models
    "accelerate": LLAMA + 'report = lz.accelerate(model.eval(), measure=False)',
    "auto": 'with lz.auto() as auto:              # or LAYERZERO_AUTO=1\n'
            '    ...                              # load models of transformers and diffusers\n'
            'print(auto)',
    "attn_processor": 'processor = lz.attn_processor()      # for a diffusers model: '
                      'set_attn_processor(processor)',
    "kv_cache": 'cache = lz.kv_cache("paged", pages=8, page_size=16, kv_heads=2, head_dim=64)',
    "page_table_from_csr": 'table, lengths = lz.page_table_from_csr(torch.tensor([0, 2, 3]), '
                           'torch.tensor([5, 1, 4]))',
    "patch": LLAMA + 'report = lz.patch(model)',
    "patched": LLAMA + 'with lz.patched(model):\n    out = model(torch.arange(9)[None])',
    "register_diffusers": 'lz.register_diffusers()              # then: '
                          'set_attention_backend("layerzero")',
    "register_transformers": 'lz.register_transformers()           # then: '
                             'attn_implementation="layerzero"',
    "sample_minp": 'tokens = lz.sample_minp(torch.randn(4, 1000), 0.05)',
    "sample_topk": 'tokens = lz.sample_topk(torch.randn(4, 1000), 50)',
    "sample_topp": 'tokens = lz.sample_topp(torch.randn(4, 1000), 0.9)',
    "unaccelerate": LLAMA + 'lz.accelerate(model.eval(), measure=False)\nlz.unaccelerate(model)',
    "unpatch": LLAMA + 'lz.patch(model)\nlz.unpatch(model)',
    # production
    "load_gguf": 'try:\n    model = lz.load_gguf("model.gguf")\n    print("".join('
                 'model.generate("Hello", max_tokens=8)))\nexcept lz.errors.DataError as e:\n    '
                 'print(e)',
    "serve_metrics": 'with lz.serve_metrics() as server:\n    print(server.url)',
    "write_bundle": 'lz.write_bundle("bundle.tar.gz", device="cpu")',
    # groups
    "graphs.graph": 'x = torch.ones(2, 8)\nif torch.cuda.is_available():\n    x = x.cuda()\n'
                    '    lz.graphs.warmup_capture(lz.rms_norm, x)\n    cuda_graph = '
                    'torch.cuda.CUDAGraph()\n'
                    '    with lz.graphs.graph(cuda_graph) as held:\n        out = lz.rms_norm(x)\n'
                    '    print(held.kernels)',
    "graphs.is_graph_safe": 'verdict = lz.graphs.is_graph_safe("torch.rms_norm")',
    "graphs.validate_graph_capture": 'report = lz.graphs.validate_graph_capture(lz.rms_norm, '
                                     'torch.ones(2, 8))',
    "graphs.warmup_capture": 'if torch.cuda.is_available():\n'
                             '    lz.graphs.warmup_capture(lz.rms_norm, torch.ones(2, 8, '
                             'device="cuda"))',
    "grouped._flash_attn_varlen_backward_grouped": '''
        starts, k = torch.tensor([0, 4], dtype=torch.int32), torch.randn(8, 2, 16)
        q_list, ends = [torch.randn(4, 2, 16), torch.randn(4, 2, 16)], [4, 8]
        lists = [starts, starts], [starts, 2 * starts], [4, 4], ends
        outs, lses, _, _ = lz.grouped._flash_attn_varlen_forward_grouped(q_list, k, k, *lists)
        dq_list, dk, dv = lz.grouped._flash_attn_varlen_backward_grouped(outs, q_list, k, k, outs, lses, *lists)
        ''',
    "grouped._flash_attn_varlen_forward_grouped": '''
        starts, k = torch.tensor([0, 4], dtype=torch.int32), torch.randn(8, 2, 16)
        outs, lses, _, _ = lz.grouped._flash_attn_varlen_forward_grouped(
            [torch.randn(4, 2, 16), torch.randn(4, 2, 16)], k, k, [starts, starts], [starts, 2 * starts],
            [4, 4], [4, 8])
        ''',
    "grouped.items_from_cu_seqlens": '''
        starts = torch.tensor([0, 5, 12])
        items = lz.grouped.items_from_cu_seqlens(starts, starts)
        q = torch.randn(12, 4, 64)
        out = lz.grouped_attention(q, q, q, items, 7, 7, is_causal=True)
        ''',
    "kernels.Const": 'load = lambda: lz.kernels.direct(torch.nn.functional.rms_norm, "x", '
                     'lz.kernels.Const((8,)))',
    "kernels.GPUGeneration": 'assert lz.kernels.GPUGeneration.HOPPER < '
                             'lz.kernels.GPUGeneration.BLACKWELL',
    "kernels.Hub": 'hub = lz.kernels.Hub(allow=("kernels-community/*",))',
    "kernels.HubError": 'try:\n    lz.kernels.Hub(allow=("me/*",)).load("you/norm", version=1)\n'
                        'except lz.kernels.HubError as error:\n    print(error)',
    "kernels.direct": 'load = lambda: lz.kernels.direct(torch.add, "x", "residual")',
    "kernels.triton_cache": 'compiled = lz.kernels.triton_cache()',
    "kernels.triton_kernel": '''
        def launch(x, eps=1e-6):
            out, hidden = torch.empty_like(x), x.shape[-1]
            return out, (x, out, hidden, eps), {"BLOCK": 1 << (hidden - 1).bit_length()}

        kernel = lz.kernels.triton_kernel(
            "mine.norm", lz.op("rms_norm"), "my_kernels.device:norm", launch=launch,
            grid=lambda given: (given["x_ptr"].numel() // given["hidden"],))
        ''',
    "kernels.triton_kernels": '''
        def launch(x, eps=1e-6):
            out, hidden = torch.empty_like(x), x.shape[-1]
            return out, (x, out, hidden, eps), {"BLOCK": 1 << (hidden - 1).bit_length()}

        kernels = lz.kernels.triton_kernels(
            "mine.norm", lz.op("rms_norm"), "my_kernels.device:norm", launch=launch,
            grid=lambda given: (given["x_ptr"].numel() // given["hidden"],),
            configs=({"num_warps": 2}, {"num_warps": 4}))
        ''',
    "kernels.use_capabilities": 'from layerzero.world import capabilities, snapshot\n'
                                'limits = capabilities.export(snapshot.current().catalog)\n'
                                'lz.kernels.use_capabilities(limits)',
    "positions.alibi_bias": 'bias = lz.positions.alibi_bias(8, 16, 16, is_causal=True)',
    "positions.alibi_slopes": 'slopes = lz.positions.alibi_slopes(8)',
    "positions.rope_tables": 'cos, sin = lz.positions.rope_tables(64, 128)\nq = torch.randn(1, 8, '
                             '128, 64)\n'
                             'q, k = lz.rope(q, q, cos, sin, style="rotate_half")',
    "positions.xpos_tables": '(cos_q, sin_q), (cos_k, sin_k) = lz.positions.xpos_tables(64, 128)',
    "quant.WeightOnly": LLAMA + 'wanted = lz.quant.WeightOnly("int4", group_size=64, '
                                'skip=("*.down_proj",))\n'
                                'report = lz.accelerate(model.eval(), weights=wanted, '
                                'measure=False)',
    "quant.choose_format": 'choice = lz.quant.choose_format("cpu")',
    "quant.column_shard": 'shard = lz.quant.column_shard(torch.randn(64, 32), rank=0, world=2)',
    "quant.forget_packed": 'count = lz.quant.forget_packed()',
    "quant.from_awq": 'words = torch.zeros(128, 8, dtype=torch.int32)\n'
                      'weight = lz.quant.from_awq(words, words[:1], torch.ones(1, 64))\n'
                      'y = lz.quantized_linear(torch.randn(2, 128), *weight[:3], '
                      'format=weight.format, group_size=weight.group_size)',
    "quant.from_gptq": 'words = torch.zeros(16, 64, dtype=torch.int32)\n'
                       'weight = lz.quant.from_gptq(words, words[:1, :8], torch.ones(1, 64))',
    "quant.limit_packed": 'lz.quant.limit_packed(1 << 30)',
    "quant.packed_weights": 'print(lz.quant.packed_weights())',
    "quant.quantized_shard": 'q, scales, *_ = lz.quantize(torch.randn(64, 32), format="int8")\n'
                             'shard = lz.quant.quantized_shard(q, scales, None, 0, 2, '
                             'format="int8")',
    "quant.row_shard": 'shard = lz.quant.row_shard(torch.randn(64, 32), rank=0, world=2)',
    "speculative.generate": '''
        def draft(tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(tokens), 99)

        def target(tokens: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
            return torch.zeros(len(tokens), count, 99)

        result = lz.speculative.generate(draft, target, torch.tensor([[1, 2]]), max_new_tokens=5, seed=0)
        ''',
    "speculative.tree_attention_mask":
        'mask = lz.speculative.tree_attention_mask(torch.tensor([[-1, 0, 0]]))',
    "speculative.tree_positions": 'positions = lz.speculative.tree_positions(torch.tensor([[-1, 0, '
                                  '0]]))',
    "speculative.verify": '''
        draft, target = torch.rand(1, 3, 9).softmax(-1), torch.rand(1, 4, 9).softmax(-1)
        result = lz.speculative.verify(torch.tensor([[1, 2, 3]]), draft, target, seed=0)
        ''',
    "speculative.verify_tree": '''
        draft, target = torch.rand(1, 4, 9).softmax(-1), torch.rand(1, 4, 9).softmax(-1)
        parents = torch.tensor([[-1, -1, 0]])
        result = lz.speculative.verify_tree(torch.tensor([[1, 2, 3]]), parents, draft, target, seed=0)
        ''',
    "tables.Block": '''
        norm = lz.tables.Stage("rms_norm", {"x": "input"}, ("output",))
        block = lz.tables.Block("norm", (norm,), ("output",))
        ''',
    "tables.Either": '''
        norm = lz.tables.Stage("rms_norm", {"x": "input"}, ("output",))
        either = lz.tables.Either(((norm,), (norm,)))
        ''',
    "tables.Glue": 'double = lz.tables.Glue("double", lambda x: x * 2, ("input",), ("output",))',
    "tables.Stage": 'norm = lz.tables.Stage("rms_norm", {"x": "input"}, ("output",), {"eps": '
                    '1e-5})',
    "tables.Table": CALLS + 'table: lz.tables.Table = lz.tables.solve(calls, device="cpu")',
    "tables.bind": 'x = torch.ones(2, 8)\nnorm = lz.tables.bind("rms_norm", x)\nout = norm(x)',
    "tables.check_lockfile": CALLS + 'lz.tables.write_lockfile(lz.tables.solve(calls, '
                                     'device="cpu"))\n'
                                     'assert not lz.tables.check_lockfile()',
    "tables.plan_block": '''
        norm = lz.tables.Stage("rms_norm", {"x": "input"}, ("output",))
        block = lz.tables.Block("norm", (norm,), ("output",))
        plan = lz.tables.plan_block(block, {"input": torch.ones(2, 8)})
        (out,) = plan(input=torch.ones(2, 8))
        ''',
    "tables.solve": CALLS + 'table = lz.tables.solve(calls, path="table.json", device="cpu")',
    "tables.table_in_force": 'table = lz.tables.table_in_force()',
    "tables.use_lockfile": CALLS + 'lz.tables.write_lockfile(lz.tables.solve(calls, '
                                   'device="cpu"))\n'
                                   'lz.tables.use_lockfile()',
    "tables.use_table": CALLS + 'lz.tables.use_table(lz.tables.solve(calls, device="cpu"))',
    "tables.write_lockfile": CALLS + 'table = lz.tables.solve(calls, device="cpu")\n'
                                     'lz.tables.write_lockfile(table, "layerzero.lock")',
    "testing.Call": 'call = lz.testing.Call("rms_norm", {"x": lz.testing.TensorSpec((2, 8), '
                    '"float32")})',
    "testing.TensorSpec": 'spec = lz.testing.TensorSpec((2, 8), "float32")',
    "testing.calls_for": CALLS,
    "testing.probe": 'from layerzero.backends.torch_norm import KERNELS\nreason = '
                     'lz.testing.probe(KERNELS[0])',
    "testing.read_calls": 'from pathlib import Path\n' + CALLS
    + 'lz.testing.write_calls(Path("calls.jsonl"), calls)\n'
                          'calls = lz.testing.read_calls(Path("calls.jsonl"))',
    "testing.regret": CALLS + 'report = lz.testing.regret(calls, seconds=0.05)',
    "testing.run_isolated": 'outcome = lz.testing.run_isolated("math:sqrt", 2.0, timeout=60.0)',
    "testing.write_calls": 'from pathlib import Path\n' + CALLS
    + 'lz.testing.write_calls(Path("calls.jsonl"), calls)',
    "tokens.forget_prefixes": 'lz.tokens.forget_prefixes()',
    "tokens.load_tokenizer": WORDS + 'ids = lz.tokenize("hello", lz.tokens.load_tokenizer(words))',
    "tokens.patch_tokenizer": FAST + 'lz.tokens.patch_tokenizer(fast)',
    "tokens.prefix_memories": 'counts = lz.tokens.prefix_memories()',
    "tokens.tokenizer_for": FAST + 'handle = lz.tokens.tokenizer_for(fast)',
    "tokens.unpatch_tokenizer": FAST
    + 'lz.tokens.patch_tokenizer(fast)\nlz.tokens.unpatch_tokenizer(fast)',
}
