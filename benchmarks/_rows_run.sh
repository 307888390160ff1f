export PYTHONPATH=$PWD/src LAYERZERO_CACHE_DIR=/tmp/lzc-rows PYTHONUNBUFFERED=1
S=$PWD/benchmarks/decode_layers.py
timeout 75 python $S --out $OUT/a.json 2>&1 | tail -40
timeout 40 python $S --carveout -1 --alone "" --variants "one launch;rings of 9;half and 4 warps;quarter;no attention" --out $OUT/b.json 2>&1 | tail -12
timeout 40 python $S --batch 16 --alone "" --variants "16 rows;16 rows, 8 warps;16 rows, down 8 x 8;16 rows, split;16 rows, down 4 x 8" --out $OUT/c.json 2>&1 | tail -12
timeout 60 python -m pytest -q -x $PWD/tests/device/test_graph_edges.py 2>&1 | tail -5
