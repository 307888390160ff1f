export PYTHONPATH=$PWD/src LAYERZERO_CACHE_DIR=/tmp/lzc-rows PYTHONUNBUFFERED=1
timeout 100 python -m pytest -q $PWD/tests/device/test_captured_step_gpu.py $PWD/tests/device/test_graph_edges.py 2>&1 | tail -40
