use slabwise::nn::*;
use slabwise::prelude::*;
use slabwise::optim::Sgd;
fn show(name: &str, dims: &[usize], f: impl for<'t> Fn(&Scope, Tensor<'t>) -> Tensor<'t>) {
    let params = Params::seeded(1);
    let trace = Trace::training();
    let x = trace.input("x", F32, dims);
    let w = trace.param(&params.root().param("scale", dims, Init::Constant(1.0)));
    let y = f(&params.root(), x * w);
    let loss = (y*y).sum();
    trace.minimize(loss, Sgd::new(0.1));
    let mut s = Session::new(Device::Cpu, params).unwrap();
    let p = s.compile(&trace, [loss]).unwrap();
    println!("== {name}: slab {}\n", p.plan().slab_bytes());
}
#[test]
fn zz() {
    log::set_logger(&L).unwrap(); log::set_max_level(log::LevelFilter::Debug);
    show("layer", &[64, 256], |at, x| x.apply(&LayerNorm::new(at / "norm", 256)).tanh());
    show("rms", &[64, 256], |at, x| x.apply(&RmsNorm::new(at / "norm", 256)).tanh());
    show("bn", &[8, 16, 6, 6], |at, x| x.apply(&BatchNorm2d::new(at / "norm", 16)).relu());
    show("gn", &[8, 16, 6, 6], |at, x| x.apply(&GroupNorm::new(at / "norm", 4, 16)).relu());
    show("softmax", &[64, 256], |_, x| x.softmax(1));
    show("attn", &[2, 8, 3*16], |_, x| x.self_attention(4, true, Mask::None));
}
struct L;
impl log::Log for L { fn enabled(&self, _: &log::Metadata) -> bool { true } fn log(&self, r: &log::Record) { println!("{}", r.args()); } fn flush(&self) {} }
