import sys,time,os,threading
import torch, layerzero as lz
from helpers import rows, normed
def test_x():
    import faulthandler; faulthandler.dump_traceback_later(20, exit=True)
    shapes = [rows(2, h) for h in range(8, 72, 8)]
    call=lz.rms_norm
    for x in shapes: call(x)
    stop=threading.Event()
    def disturb():
        while not stop.wait(.0005):
            lz.clear_cache()
            with lz.prefer("reference.*"): call(shapes[0])
    def make():
        while not stop.wait(.0005):
            for x in shapes: call(x)
            lz.stats()
    ws=[threading.Thread(target=t,daemon=True) for t in (disturb,make,make)]
    [w.start() for w in ws]
    for i in range(4):
        t=time.perf_counter(); pid=os.fork()
        if pid==0:
            import faulthandler; faulthandler.dump_traceback_later(4, exit=True)
            t1=time.perf_counter()
            for x in shapes: call(x)
            t2=time.perf_counter()
            for x in shapes: torch.testing.assert_close(call(x), normed(x))
            t3=time.perf_counter()
            lz.configure(strict_mode=True)
            t4=time.perf_counter()
            print("child",round(t1-t,3),round(t2-t1,3),round(t3-t2,3),round(t4-t3,3),flush=True)
            os._exit(0)
        t1=time.perf_counter()
        os.waitpid(pid,0)
        print("parent fork",round(t1-t,3),"wait",round(time.perf_counter()-t1,3))
    stop.set()
    [w.join() for w in ws]
