//! Training steps of the built-in models.

use std::time::Instant;

use serde_json::{Map, Value, json};
use slabwise::{
    Budget, Bytes, ChannelsLast, CompileOptions, Device, EpilogueSums, Error, Offload, Params,
    Program, Result, Session,
};
use slabwise_models::{Examples, Model};

/// The bandwidth of the link to the host, by which offloaded buffers are chosen: that of PCIe 5 in
/// each direction.
const LINK: Bytes = Bytes(50_000_000_000);
/// Steps whose losses are compared.
const COMPARED: usize = 5;

/// A model with its program.
struct Step {
    session: Session,
    program: Program<1>,
    batch: (Examples, ndarray::ArrayD<i32>),
    compile_s: f64,
}

impl Step {
    fn open(
        model: &str,
        batch: &str,
        precision: &str,
        budget: impl FnOnce(Session) -> Session,
    ) -> Result<Step> {
        let (model, batch) = (Model::parse(model)?, super::number(batch)?);
        super::dtype(precision)?;
        let (of_products, options) = crate::items::compiled_as(precision);
        let params = Params::seeded(0);
        let network = model.build(&params).with_precision(of_products);
        let mut session = budget(Session::new(Device::cuda(0)?, params)?.with_options(options));
        let began = Instant::now();
        let program = network.training(&mut session, batch, model.optimizer())?;
        let compile_s = began.elapsed().as_secs_f64();
        Ok(Step {
            session,
            program,
            batch: model.batch(batch as usize, 1),
            compile_s,
        })
    }

    /// The next loss.
    fn loss(&mut self) -> Result<f32> {
        let (examples, labels) = &self.batch;
        Ok(self.session.run(&self.program, (examples, labels))?[0].item())
    }

    /// Its times and its memory.
    fn measured(&mut self) -> Result<Map<String, Value>> {
        let began = Instant::now();
        self.loss()?;
        let first_step_s = began.elapsed().as_secs_f64();
        let (examples, labels) = &self.batch;
        let mut fields =
            super::runs(&mut self.session, &self.program, &(examples, labels))?.fields();
        fields.extend(super::about(&self.session, &self.program));
        fields.insert("compile_s".into(), json!(self.compile_s));
        fields.insert("first_step_s".into(), json!(first_step_s));
        Ok(fields)
    }
}

/// A training step: inputs from the host, weights updated.
pub fn step(model: &str, batch: &str, precision: &str) -> Result<Value> {
    Ok(Value::Object(
        Step::open(model, batch, precision, |session| session)?.measured()?,
    ))
}

/// The same with the channels of all images innermost (`channels-last`), with (`sums-in-epilogues`) or
/// without the sums of norms in the epilogues of convolutions, or of none (`channels-first`).
pub fn step_with(model: &str, batch: &str, precision: &str, way: &str) -> Result<Value> {
    let (channels_last, epilogue_sums) = match way {
        "channels-last" => (ChannelsLast::All, EpilogueSums::Off),
        "sums-in-epilogues" => (ChannelsLast::All, EpilogueSums::All),
        "channels-first" => (ChannelsLast::Off, EpilogueSums::Off),
        _ => {
            return Err(Error::Value(format!(
                "{way:?} is none of channels-last, sums-in-epilogues and channels-first"
            )));
        }
    };
    let options = CompileOptions {
        channels_last,
        epilogue_sums,
        ..crate::items::compiled_as(precision).1
    };
    let mut step = Step::open(model, batch, precision, |s| s.with_options(options))?;
    Ok(Value::Object(step.measured()?))
}

/// The bytes that the driver allocated for a step beside the planned ones. A difference is an error
/// unless it is the rest of a page.
pub fn bytes(model: &str, batch: &str) -> Result<Value> {
    let mut step = Step::open(model, batch, "f32", |session| session)?;
    for _ in 0..3 {
        step.loss()?;
    }
    // Includes the staging buffers for the next run, beside the slab.
    let (planned, measured) = (
        step.program.plan().slab_bytes(),
        step.session.last_run().peak_slab_bytes,
    );
    if planned != measured {
        return Err(Error::Value(format!(
            "kernels reached {measured} bytes of a slab of {planned}"
        )));
    }
    let fields = super::about(&step.session, &step.program);
    let (planned, given) = (
        step.session.persistent_bytes() + planned,
        step.session.device_bytes(),
    );
    const PAGE: u64 = 2 << 20;
    if given < planned || given - planned > PAGE {
        return Err(Error::Value(format!(
            "the driver gave {given} bytes, {planned} are planned: more than the rest of a page apart"
        )));
    }
    Ok(Value::Object(fields))
}

/// A step within half of its slab, compared with the same step in all of it: the losses must be
/// equal.
pub fn budget(model: &str, batch: &str, way: &str) -> Result<Value> {
    let link = match way {
        "recompute" => None,
        "offload" => Some(Offload::new(LINK)),
        _ => {
            return Err(Error::Value(format!(
                "{way:?} is no way to keep a budget; there are recompute and offload"
            )));
        }
    };
    let losses = |step: &mut Step| {
        (0..COMPARED)
            .map(|_| step.loss())
            .collect::<Result<Vec<f32>>>()
    };
    // One after the other, so that they do not share the device's memory.
    let mut whole = Step::open(model, batch, "f32", |session| session)?;
    let (expected, slab) = (losses(&mut whole)?, whole.session.slab_bytes());
    drop(whole);
    let mut within = Step::open(model, batch, "f32", |session| {
        session
            .with_budget(Budget::Fraction(0.5))
            .with_offload(link)
    })?;
    let got = losses(&mut within)?;
    for (step, (a, b)) in got.iter().zip(&expected).enumerate() {
        if (a - b).abs() > 1e-3 * b.abs().max(1.0) {
            return Err(Error::Value(format!(
                "step {step}: the loss is {a} within the budget and {b} without"
            )));
        }
    }
    let mut fields = within.measured()?;
    let report = within.program.plan().budget_report();
    fields.insert("slab_bytes".into(), json!(within.session.slab_bytes()));
    fields.insert("slab_without_bytes".into(), json!(slab));
    fields.insert("host_bytes".into(), json!(within.session.host_bytes()));
    fields.insert("kernels_again".into(), json!(report.tasks.len()));
    fields.insert("sent".into(), json!(report.offloaded.len()));
    fields.insert("same_bits".into(), json!(got == expected));
    Ok(Value::Object(fields))
}
