//! Prints a case as a self-contained test: one function over the public interface.

mod statement;

use std::fmt::Write;

use slabwise::{DType, Precision};
use slabwise_compiler::reference::Array;

use crate::build::INPUTS;
use crate::case::{Axis, Case, Op, Program};
use crate::run::{Outcome, data};
use crate::setup::{Feed, Setup};
use statement::expression;

/// The assertion of a printed test about its runs.
pub enum Claim<'a> {
    /// That they succeed.
    Runs,
    /// That the second way gives the bits of the first.
    SameBits,
    /// That the second way equals the first within rounding.
    Close,
    /// That the first way gives these numbers, within rounding.
    Gives(&'a Outcome),
}

/// The beginning of every printed test.
const HELPERS: &str = r#"    use half::{bf16, f16};
    use ndarray::{ArrayD, IxDyn};
    use slabwise::nn::*;
    use slabwise::optim::*;
    use slabwise::prelude::*;
    use slabwise::tensor::{AttentionOptions, Beyond, ConvOptions, CrossEntropy, Interpolate, PadMode, Padding, PoolOptions, Reduction, Sampling};
    use slabwise::{CompileOptions, LossScale, Output};

    fn array<T>(shape: &[usize], values: Vec<T>) -> ArrayD<T> {
        ArrayD::from_shape_vec(IxDyn(shape), values).expect("as many values as the shape has elements")
    }

    fn numbers(output: &Output<'_>) -> Result<Vec<f64>> {
        Ok(match output.dtype() {
            F32 => output.view::<f32>()?.iter().map(|&v| f64::from(v)).collect(),
            F16 => output.view::<f16>()?.iter().map(|v| v.to_f64()).collect(),
            BF16 => output.view::<bf16>()?.iter().map(|v| v.to_f64()).collect(),
            I32 => output.view::<i32>()?.iter().map(|&v| f64::from(v)).collect(),
            U8 | Bool => output.view::<u8>()?.iter().map(|&v| f64::from(v)).collect(),
        })
    }
"#;

/// The test function of a case, run by the default and in one other way.
pub fn test(name: &str, about: &str, case: &Case, setup: &Setup, claim: &Claim<'_>) -> String {
    let mut text = String::new();
    for line in about.lines().take(6) {
        let _ = writeln!(text, "/// {}", line.trim());
    }
    let _ = writeln!(
        text,
        "#[test]\n#[allow(clippy::all, dead_code, unused_imports, unused_mut, unused_parens, unused_variables)]"
    );
    let _ = writeln!(text, "fn {name}() -> slabwise::Result<()> {{\n{HELPERS}");
    let _ = writeln!(
        text,
        "    // The first way is the default, the second: {}.",
        setup.describe()
    );
    let _ = writeln!(
        text,
        "    let run = |second: bool| -> Result<Vec<Vec<f64>>> {{"
    );
    Body {
        case,
        setup,
        text: &mut text,
    }
    .write();
    let _ = writeln!(text, "    }};");
    close(&mut text, setup, claim);
    let _ = writeln!(text, "    Ok(())\n}}");
    text
}

fn close(text: &mut String, setup: &Setup, claim: &Claim<'_>) {
    let near = "(x.is_nan() && y.is_nan()) || x == y || (x - y).abs() <= 2e-4 * (1.0 + x.abs().max(y.abs()))";
    let bits = "(x.is_nan() && y.is_nan()) || x.to_bits() == y.to_bits()";
    let (wanted, same) = match claim {
        Claim::Runs => {
            let _ = writeln!(text, "    run(false)?;");
            if *setup != Setup::default() {
                let _ = writeln!(text, "    run(true)?;");
            }
            return;
        }
        Claim::SameBits => ("run(true)?".to_string(), bits),
        Claim::Close => ("run(true)?".to_string(), near),
        Claim::Gives(outcome) => {
            let arrays = outcome
                .outputs
                .iter()
                .flatten()
                .chain(outcome.variables.values());
            let rows: Vec<String> = arrays
                .map(|a| format!("vec![{}]", list(a, DType::F32).replace("f32", "f64")))
                .collect();
            (format!("[{}]", rows.join(", ")), near)
        }
    };
    let _ = writeln!(text, "    let (gave, wanted) = (run(false)?, {wanted});");
    let _ = writeln!(text, "    assert_eq!(gave.len(), wanted.len());");
    let _ = writeln!(
        text,
        "    for (at, (a, b)) in gave.iter().zip(&wanted).enumerate() {{"
    );
    let _ = writeln!(text, "        let same = |x: f64, y: f64| {same};");
    let _ = writeln!(
        text,
        "        let all = a.len() == b.len() && a.iter().zip(b).all(|(&x, &y)| same(x, y));"
    );
    let _ = writeln!(
        text,
        "        assert!(all, \"result {{at}}: {{a:?}} and {{b:?}}\");\n    }}"
    );
}

/// The elements of an array as literals.
fn list(array: &Array, dtype: DType) -> String {
    let float = |v: f64| match v {
        v if v.is_nan() => "f32::NAN".to_string(),
        v if v == f64::INFINITY => "f32::INFINITY".to_string(),
        v if v == f64::NEG_INFINITY => "f32::NEG_INFINITY".to_string(),
        v => format!("{:?}f32", v as f32),
    };
    let one = |v: &f64| match dtype {
        DType::F32 => float(*v),
        DType::F16 => format!("f16::from_f32({})", float(*v)),
        DType::BF16 => format!("bf16::from_f32({})", float(*v)),
        DType::I32 => format!("{v}i32"),
        DType::U8 | DType::Bool => format!("{v}u8"),
    };
    array.values.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn rust_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::I32 => "i32",
        DType::U8 | DType::Bool => "u8",
    }
}

struct Body<'a> {
    case: &'a Case,
    setup: &'a Setup,
    text: &'a mut String,
}

impl Body<'_> {
    fn line(&mut self, text: &str) {
        let _ = writeln!(self.text, "        {text}");
    }

    fn write(mut self) {
        let (case, setup) = (self.case, self.setup);
        let stored = case
            .stored
            .map_or_else(String::new, |dtype| format!(".stored_in({dtype:?})"));
        self.line(&format!(
            "let params = Params::seeded({}){stored};",
            case.seed % 1000
        ));
        self.line("let root = params.root();");
        for (i, param) in case.params.iter().enumerate() {
            let init = param
                .value
                .map_or("Init::Uniform { low: -1.0, high: 1.0 }".to_string(), |v| {
                    format!("Init::Constant({v:?})")
                });
            self.line(&format!(
                "let w{i} = root.param(\"w{i}\", {}, {init});",
                lengths(&param.dims)
            ));
        }
        self.layers();
        for (i, dim) in case.dims.iter().enumerate() {
            let free = format!("Dim::unbounded({:?})", dim.name);
            let bounded = format!("Dim::bounded({:?}, {})", dim.name, dim.max);
            let (first, second) = if dim.free {
                (free, bounded)
            } else {
                (bounded, free)
            };
            let value = if setup.swap_dims {
                format!("if second {{ {second} }} else {{ {first} }}")
            } else {
                first
            };
            self.line(&format!("let dim{i} = {value};"));
        }
        for (at, program) in case.programs.iter().enumerate() {
            self.program(at, program);
        }
        self.session();
        self.line("let mut session = open()?;");
        for at in 0..case.programs.len() {
            if setup.alone {
                self.line(&format!("let mut session{at} = open()?;"));
                self.line(&format!("let mut program{at} = program{at}_in(if second {{ &mut session{at} }} else {{ &mut session }})?;"));
            } else {
                self.line(&format!(
                    "let mut program{at} = program{at}_in(&mut session)?;"
                ));
            }
        }
        self.line("let mut results = Vec::new();");
        for (run, &at) in case.runs.iter().enumerate() {
            self.run(run, at);
        }
        if !setup.alone {
            self.line("let names: Vec<String> = session.names().map(String::from).collect();");
            self.line("let mut names = names;");
            self.line("names.sort();");
            self.line("for name in names {");
            self.line(
                "    results.push(session.value(&name)?.iter().map(|&v| f64::from(v)).collect());",
            );
            self.line("}");
        }
        self.line("Ok(results)");
    }

    fn layers(&mut self) {
        let mut known = Vec::new();
        for statement in self.case.programs.iter().flat_map(|p| &p.statements) {
            let Op::Layer { layer, name, sizes } = statement.op else {
                continue;
            };
            if known.contains(&name) {
                continue;
            }
            known.push(name);
            self.line(&format!(
                "let l{name} = {}::new(&root / \"l{name}\", {};",
                layer.text(),
                layer.options(sizes)
            ));
        }
    }

    fn session(&mut self) {
        let setup = self.setup;
        self.line("let open = || -> Result<Session> {");
        self.line("    let mut options = CompileOptions::default();");
        if setup.budget.is_some() {
            self.line(&format!(
                "    if second {{ options.planner.effort = {}; }}",
                crate::setup::EFFORT
            ));
        }
        for switch in &setup.switches {
            self.line(&format!("    if second {{ {}; }}", switch.text()));
        }
        let threads = if setup.threads == 1 {
            "1".to_string()
        } else {
            format!("if second {{ {} }} else {{ 1 }}", setup.threads)
        };
        self.line(&format!(
            "    let mut session = Session::new(Device::Cpu, params.clone())?.with_threads({threads}).with_options(options);"
        ));
        if let Some(percent) = setup.budget {
            let fraction = f64::from(percent) / 100.0;
            self.line(&format!(
                "    if second {{ session = session.with_budget(Budget::Fraction({fraction:?})); }}"
            ));
        }
        if let Some(speed) = setup.offload {
            self.line(&format!(
                "    if second {{ session = session.with_offload(Offload::new(Bytes({speed}))); }}"
            ));
        }
        self.line("    Ok(session)");
        self.line("};");
    }

    fn program(&mut self, at: usize, program: &Program) {
        let parts = program.learn.as_ref().and_then(|l| l.parts);
        let count = program.outputs.len() + usize::from(parts.is_some());
        self.line(&format!(
            "let program{at}_in = |session: &mut Session| -> Result<Program<{count}>> {{"
        ));
        self.line(&format!(
            "    let trace = Trace::{}(){}{};",
            if program.training {
                "training"
            } else {
                "inference"
            },
            match self.case.precision {
                Precision::F32 => String::new(),
                half => format!(".with_precision(slabwise::Precision::{half:?})"),
            },
            match program.learn.as_ref().and_then(|l| l.scale) {
                None => String::new(),
                Some(scale) => format!(".with_loss_scale({})", scale.text()),
            }
        ));
        let mut inputs = 0;
        for (i, statement) in program.statements.iter().enumerate() {
            let args: Vec<String> = statement.args.iter().map(|a| format!("v{a}")).collect();
            let value = match &statement.op {
                Op::Input { dtype, shape, .. } => {
                    inputs += 1;
                    format!(
                        "trace.input(\"{}\", {dtype:?}, {})",
                        INPUTS[inputs - 1],
                        written(shape)
                    )
                }
                Op::State(state) => self.state(*state) + ".value()",
                op => expression(op, &args),
            };
            self.line(&format!("    let v{i} = {value};"));
        }
        for &(state, value) in &program.sets {
            let state = self.state(state);
            self.line(&format!("    {state}.set(v{value});"));
        }
        if let Some((input, position)) = program.donate {
            self.line(&format!("    trace.donate(v{input}, {position});"));
        }
        let mut outputs: Vec<String> = program.outputs.iter().map(|o| format!("v{o}")).collect();
        if let Some(learn) = &program.learn {
            let (rule, loss) = (learn.rule.text(), learn.loss);
            match learn.parts {
                None => self.line(&format!("    trace.minimize(v{loss}, {rule});")),
                Some(parts) => {
                    self.line(&format!("    let each = v{loss}.split(0, {parts});"));
                    self.line(&format!("    let loss = trace.minimize_in_parts({parts}, {rule}, |i| each[i].square().mean());"));
                    outputs.push("loss".into());
                }
            }
            if let Some(also) = learn.also {
                self.line(&format!("    trace.minimize(v{also}, {rule});"));
            }
        }
        self.line(&format!(
            "    session.compile(&trace, [{}])",
            outputs.join(", ")
        ));
        self.line("};");
    }

    fn state(&self, at: usize) -> String {
        let state = &self.case.states[at];
        format!(
            "trace.state(\"s{at}\", {:?}, {}, Init::Constant(0.0))",
            state.dtype,
            lengths(&state.dims)
        )
    }

    fn run(&mut self, run: usize, at: usize) {
        let (case, setup) = (self.case, self.setup);
        let program = &case.programs[at];
        if setup.anew {
            self.line("if second {");
            self.line(&format!("    program{at} = program{at}_in(&mut session)?;"));
            self.line("}");
        }
        self.line("{");
        let mut names = Vec::new();
        let mut kinds = Vec::new();
        for (place, input) in program.inputs().enumerate() {
            let Some(values) = data(case, &program.statements[input].op, run) else {
                continue;
            };
            let name = INPUTS[place];
            let typed = format!(
                "array::<{}>(&{:?}, vec![{}])",
                rust_type(values.dtype),
                values.dims,
                list(&values, values.dtype)
            );
            self.line(&format!("    let {name} = {typed};"));
            let donated =
                setup.feed == Feed::Donated && program.donate.is_some_and(|(of, _)| of == input);
            kinds.push((
                values.dtype != DType::Bool && setup.feed != Feed::Host,
                donated,
            ));
            names.push(name);
        }
        let here = if setup.alone {
            format!("(if second {{ &mut session{at} }} else {{ &mut session }})")
        } else {
            "session".to_string()
        };
        let call = |dynamic: bool| if dynamic { "run_dynamic" } else { "run" };
        let feed = |list: Vec<String>| match list.as_slice() {
            [] => "()".to_string(),
            [one] => format!("({one},)"),
            many => format!("({})", many.join(", ")),
        };
        let host = feed(names.iter().map(|n| format!("&{n}")).collect());
        let push = "for output in &outputs { results.push(numbers(output)?); }";
        if setup.feed == Feed::Host {
            let method = |m: &str| format!("{here}.{m}(&program{at}, {host})?");
            let value = if setup.dynamic {
                format!(
                    "if second {{ {} }} else {{ {} }}",
                    method("run_dynamic"),
                    method("run")
                )
            } else {
                method("run")
            };
            self.line(&format!("    let outputs = {value};"));
            self.line(&format!("    {push}"));
        } else {
            self.line("    if second {");
            let mut fed = Vec::new();
            for (name, (uploaded, donated)) in names.iter().zip(&kinds) {
                if *uploaded {
                    self.line(&format!(
                        "        let {name} = {here}.upload(\"{name}\", &{name})?;"
                    ));
                }
                fed.push(if *uploaded && *donated {
                    format!("{name}.donate()")
                } else {
                    format!("&{name}")
                });
            }
            self.line(&format!(
                "        let outputs = {here}.{}(&program{at}, {})?;",
                call(setup.dynamic),
                feed(fed)
            ));
            self.line(&format!("        {push}"));
            self.line("    } else {");
            self.line(&format!(
                "        let outputs = {here}.run(&program{at}, {host})?;"
            ));
            self.line(&format!("        {push}"));
            self.line("    }");
        }
        self.line("}");
        if setup.reload && run == 0 {
            self.line("if second {");
            self.line("    let path = std::env::temp_dir().join(format!(\"random-program-{}.safetensors\", std::process::id()));");
            self.line("    session.save(&path)?;");
            self.line("    session = open()?;");
            for at in 0..case.programs.len() {
                self.line(&format!("    program{at} = program{at}_in(&mut session)?;"));
            }
            self.line("    session.load(&path)?;");
            self.line("    std::fs::remove_file(&path).expect(\"the file was written\");");
            self.line("}");
        }
    }
}

/// Fixed lengths as a shape.
fn lengths(dims: &[usize]) -> String {
    if dims.is_empty() {
        "()".into()
    } else {
        format!("{dims:?}")
    }
}

/// A shape as it is written.
fn written(shape: &[Axis]) -> String {
    if shape.is_empty() {
        return "()".into();
    }
    let fixed: Option<Vec<String>> = shape
        .iter()
        .map(|a| {
            if let Axis::Fixed(n) = a {
                Some(n.to_string())
            } else {
                None
            }
        })
        .collect();
    let any = |a: &Axis| match a {
        Axis::Fixed(n) => format!("Dim::Fixed({n})"),
        Axis::Named(at) => format!("dim{at}"),
        Axis::Open => "Dim::Fixed(-1)".into(),
    };
    let all = fixed.unwrap_or_else(|| shape.iter().map(any).collect());
    format!("[{}]", all.join(", "))
}
