//! Runs items one after the other, or several tests at once, within a total time.

use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::child::{self, Ended};
use crate::items::{CACHE, Item, Places, USES_THE_GPU, Work};
use crate::results::Output;

/// The time limits of a run.
pub struct Limits {
    /// All items together.
    pub all: Option<Duration>,
    /// Each item, where its own limit is longer.
    pub one: Option<Duration>,
    /// The number of tests that run at once.
    pub jobs: usize,
}

/// No item is started with less time than this.
const LEAST_TIME: Duration = Duration::from_secs(2);
/// The time limit of the query for the device: the first use of a driver can be slow.
const DEVICE_QUERY_LIMIT: Duration = Duration::from_secs(60);

/// The device, with the versions of its software.
///
/// # Errors
/// If there is none; the error gives the reason.
pub fn device(places: &Places) -> Result<Map<String, Value>, String> {
    let mut command = Command::new(&places.program);
    command.args(["measure", "device"]);
    let ended = child::run(command, DEVICE_QUERY_LIMIT);
    match (last_object(&ended.stdout), ended.status) {
        (Some(about), Some(status)) if status.success() => Ok(about),
        (_, None) if ended.refused.is_none() => Err(format!(
            "the driver gave no answer in {} s",
            DEVICE_QUERY_LIMIT.as_secs()
        )),
        _ => Err(ended.refused.clone().unwrap_or_else(|| ended.tail())),
    }
}

/// Runs the items and returns their results; items for which the time did not suffice have none.
///
/// # Errors
/// If a result cannot be written: no item is started after that.
pub fn run(
    items: &[Item],
    device: &Map<String, Value>,
    limits: &Limits,
    output: &mut Output,
) -> Result<Vec<Value>, String> {
    let sequence = Sequence {
        device,
        limits,
        end: limits.all.map(|all| Instant::now() + all),
        state: Mutex::new(State {
            output,
            done: Vec::new(),
            failed: None,
        }),
        count: items.len(),
    };
    for batch in items.chunk_by(|a, b| !a.timed && !b.timed) {
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(item) = batch.get(next.fetch_add(1, Ordering::Relaxed)) {
                if !sequence.item(item) {
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            (0..limits.jobs.min(batch.len())).for_each(|_| drop(scope.spawn(work)))
        });
    }
    let state = sequence
        .state
        .into_inner()
        .expect("no thread panics with it");
    state.failed.map_or(Ok(state.done), Err)
}

struct State<'a> {
    output: &'a mut Output,
    done: Vec<Value>,
    failed: Option<String>,
}

struct Sequence<'a> {
    device: &'a Map<String, Value>,
    limits: &'a Limits,
    end: Option<Instant>,
    state: Mutex<State<'a>>,
    count: usize,
}

impl Sequence<'_> {
    /// Runs an item and writes its result. Returns whether another may be started.
    fn item(&self, item: &Item) -> bool {
        let left = self.end.map_or(Duration::MAX, |end| {
            end.saturating_duration_since(Instant::now())
        });
        if left < LEAST_TIME
            || self
                .state
                .lock()
                .expect("no thread panics with it")
                .failed
                .is_some()
        {
            return false;
        }
        let own = self
            .limits
            .one
            .map_or(item.limit, |one| one.min(item.limit));
        let ended = match fresh(item) {
            Ok((command, _cache)) => child::run(command, own.min(left)),
            Err(e) => Ended::refused(format!("there is no folder for its kernels: {e}")),
        };
        let cut = ended.status.is_none() && ended.refused.is_none() && left < own;
        let mut result = Map::new();
        result.insert("item".into(), json!(item.name));
        result.extend(if cut {
            out_of_time(left)
        } else {
            judge(item, &ended, own)
        });
        result.insert("seconds".into(), json!(ended.took.as_secs_f64()));
        result.extend(self.device.clone());
        let result = Value::Object(result);
        let mut state = self.state.lock().expect("no thread panics with it");
        crate::say(&crate::table::progress(
            &result,
            state.done.len() + 1,
            self.count,
        ));
        state.failed = state.output.line(&result).err();
        state.done.push(result);
        state.failed.is_none()
    }
}

/// The command of an item, with an empty kernel cache if the item is fresh.
fn fresh(item: &Item) -> std::io::Result<(Command, Option<tempfile::TempDir>)> {
    let mut command = item.command();
    let cache = item.fresh.then(tempfile::tempdir).transpose()?;
    if let Some(cache) = &cache {
        command.env(CACHE, cache.path());
    }
    Ok((command, cache))
}

/// The result of an item for which the total time did not suffice.
fn out_of_time(left: Duration) -> Map<String, Value> {
    let why = format!("the budget had {:.0} s left for it", left.as_secs_f64());
    Map::from_iter([
        ("status".into(), json!("skipped")),
        ("error".into(), json!(why)),
    ])
}

/// The result of an item, from the end of its process.
fn judge(item: &Item, ended: &Ended, limit: Duration) -> Map<String, Value> {
    let bad = |status: &str, why: String| {
        Map::from_iter([
            ("status".into(), json!(status)),
            ("error".into(), json!(why)),
        ])
    };
    if let Some(why) = &ended.refused {
        // Software outside this project may be missing.
        let foreign = matches!(
            item.work,
            Work::Peer { .. }
                | Work::Test {
                    within: Some(_),
                    ..
                }
        );
        return bad(if foreign { "skipped" } else { "failed" }, why.clone());
    }
    let Some(status) = ended.status else {
        return bad(
            "timeout",
            format!("ended after {} s\n{}", limit.as_secs(), ended.tail())
                .trim_end()
                .into(),
        );
    };
    if let Some(signal) = ended.signal() {
        return bad(
            "crashed",
            format!("signal {signal}\n{}", ended.tail())
                .trim_end()
                .into(),
        );
    }
    if !status.success() {
        return bad("failed", ended.tail());
    }
    match &item.work {
        Work::Test { within, .. } => {
            let said = |text: &str| ended.stdout.contains(text) || ended.stderr.contains(text);
            // A checker that does not attach to the process lets the test pass.
            let unchecked = within.as_ref().filter(|checker| !said(checker.clean()));
            // A test of the emulator or of the driver without a device proves nothing about this
            // device.
            match (said(USES_THE_GPU), ended.stdout.contains("1 passed")) {
                (true, true) => match unchecked {
                    None => Map::from_iter([("status".into(), json!("ok"))]),
                    Some(checker) => bad(
                        "failed",
                        format!(
                            "the checker did not say \"{}\"\n{}",
                            checker.clean(),
                            ended.tail()
                        ),
                    ),
                },
                (false, true) => bad("skipped", "it does not use the GPU".into()),
                (_, false) => bad("failed", format!("no test of this name\n{}", ended.tail())),
            }
        }
        Work::Own(_) | Work::Peer { .. } => match last_object(&ended.stdout) {
            Some(mut said) => match said.remove("skipped") {
                Some(why) => bad("skipped", why.as_str().unwrap_or_default().into()),
                None => {
                    said.insert("status".into(), json!("ok"));
                    said
                }
            },
            None => bad("failed", format!("it gave no result\n{}", ended.tail())),
        },
    }
}

/// The last line that is a JSON object.
fn last_object(text: &str) -> Option<Map<String, Value>> {
    text.lines()
        .rev()
        .find_map(|line| match serde_json::from_str(line) {
            Ok(Value::Object(object)) => Some(object),
            _ => None,
        })
}
