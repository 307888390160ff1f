export PYTHONPATH=$PWD/src LAYERZERO_CACHE_DIR=/tmp/lzc-rows PYTHONUNBUFFERED=1
B=$PWD/benchmarks
timeout 70 python $B/decode_layers.py --alone "" --out $OUT/layers.json 2>&1 | tail -30
cat > /tmp/rows_record.py <<'P'
import json, os, runpy, sys
sys.path.insert(0, sys.argv[1])
from layerzero.backends.cuda.linear import rows
found = json.load(open(os.environ["OUT"] + "/layers.json"))["layers"]
if not found["ahead"].get("us", 1e9) < found["one launch"]["us"]:
    launch = rows.launch
    rows.launch = lambda *args, following=None, **named: launch(*args, **named)
    print("nothing ahead")
sys.argv = [sys.argv[1] + "/accelerated.py", "--record", "--rows", "8b-b8", "--no-compile", "--rounds", "6", "--row-seconds", "40", "--out", os.environ["OUT"] + "/record.json"]
runpy.run_path(sys.argv[0], run_name="__main__")
P
timeout 110 python /tmp/rows_record.py $B 2>&1 | tail -22
timeout 90 python -m pytest -q -x $PWD/tests/device/test_captured_step_gpu.py $PWD/tests/device/test_graph_edges.py 2>&1 | tail -25
