//! The walk through a schedule that lets tasks pass those that wait for a collective.
//!
//! The walk simulates the tasks of a plan in its order, timed by their costs. A collective starts
//! as soon as its sources are complete and ends when its time is over; until then the tasks that
//! depend on it are deferred, and later ones run ahead. A task runs ahead only if all deferred ones
//! could still be caught up with afterwards, in the order of the plan, without more live bytes than
//! the target. If it cannot, the oldest collective is waited for, and deferred tasks go first.
//! Therefore no state of the walk needs more bytes than the target if no state of the plan does.

use std::collections::VecDeque;

use super::Event;
use crate::dag::relations::{Relations, count_looks};
use crate::dag::{Dag, TaskId};
use crate::plan::Plan;

/// The most collectives in flight at once.
const IN_FLIGHT_MAX: usize = 32;

/// The tasks that the walk looks ahead, so that its time is linear in the tasks.
const AHEAD: usize = 512;

/// The task whose bytes a buffer has taken over, if it is computed in place.
type TakenAt = Vec<Option<(TaskId, u32)>>;

pub(super) struct Walk<'a> {
    dag: &'a Dag,
    relations: &'a Relations,
    order: &'a [TaskId],
    is_collective: &'a [bool],
    /// For each buffer that is computed in place: by which task, on the bytes of which other.
    taken: TakenAt,
    target: u64,
}

/// The state between two events.
struct State {
    /// By task, the number of unfinished tasks that it depends on.
    waiting: Vec<u32>,
    /// By task, whether it has run, or has started if it is a collective.
    begun: Vec<bool>,
    /// By buffer, the number of tasks that have not touched it for the last time.
    users: Vec<u32>,
    /// By buffer, whether it occupies bytes.
    alive: Vec<bool>,
    /// Collectives that have started, the oldest first.
    in_flight: VecDeque<u32>,
    totals: Totals,
    /// The changes since the last trial began.
    changes: Vec<Change>,
}

/// The numbers of a state that are those of no task or buffer.
#[derive(Clone, Copy, Default)]
struct Totals {
    /// Bytes of all live buffers.
    live: u64,
    /// The largest number of live bytes, workspaces included, since this was last set to 0.
    peak: u64,
    /// The first position of the order whose task has not begun.
    first: usize,
    /// One past the last position of the order whose task has begun.
    end: usize,
}

/// A change of the state of a task or a buffer.
#[derive(Clone, Copy)]
enum Change {
    /// A task waits for one less.
    Waiting(u32),
    /// A task has begun.
    Begun(u32),
    /// A buffer has one user less.
    Users(u32),
    /// A buffer occupies bytes, or no longer does.
    Alive(u32),
}

impl State {
    fn change(&mut self, change: Change) {
        match change {
            Change::Waiting(task) => self.waiting[task as usize] -= 1,
            Change::Begun(task) => self.begun[task as usize] = true,
            Change::Users(buffer) => self.users[buffer as usize] -= 1,
            Change::Alive(buffer) => self.alive[buffer as usize] ^= true,
        }
        self.changes.push(change);
    }

    /// Undoes all changes since the trial began.
    fn undo(&mut self) {
        count_looks(self.changes.len() as u64);
        while let Some(change) = self.changes.pop() {
            match change {
                Change::Waiting(task) => self.waiting[task as usize] += 1,
                Change::Begun(task) => self.begun[task as usize] = false,
                Change::Users(buffer) => self.users[buffer as usize] += 1,
                Change::Alive(buffer) => self.alive[buffer as usize] ^= true,
            }
        }
    }
}

impl<'a> Walk<'a> {
    pub fn new(
        dag: &'a Dag,
        relations: &'a Relations,
        once: &'a Plan,
        is_collective: &'a [bool],
        target: u64,
    ) -> Self {
        let mut taken = vec![None; dag.buffers.len()];
        for pair in &once.reused {
            taken[pair.to.index()] = Some((pair.task, pair.from.0));
        }
        Walk {
            dag,
            relations,
            order: &once.order,
            is_collective,
            taken,
            target,
        }
    }

    /// The events of the schedule.
    pub fn events(&self) -> Vec<Event> {
        let mut state = self.begin();
        let mut events = Vec::with_capacity(self.order.len());
        let (mut now, mut engine) = (0.0f64, 0.0f64);
        let mut done: VecDeque<f64> = VecDeque::new();
        while state.totals.first < self.order.len() || !state.in_flight.is_empty() {
            let is_over = done.front().is_some_and(|&done| done <= now);
            let next = if is_over { None } else { self.next(&mut state) };
            let Some(task) = next else {
                if let Some(task) = state.in_flight.front().copied() {
                    now = now.max(done.pop_front().unwrap_or(now));
                    self.finish(&mut state);
                    events.push(Event::Finish(task));
                }
                continue;
            };
            let cost = self.dag.tasks[task as usize].cost as f64;
            self.apply(&mut state, task);
            if self.is_collective[task as usize] {
                engine = engine.max(now) + cost;
                done.push_back(engine);
                events.push(Event::Start(task));
            } else {
                now += cost;
                events.push(Event::Run(task));
            }
        }
        events
    }

    fn begin(&self) -> State {
        let tasks = self.dag.tasks.len() as u32;
        let degree = |t| self.relations.before.row(t as usize).len() as u32;
        let buffers = self.dag.buffers.iter().enumerate();
        let users = buffers.map(|(b, buffer)| {
            // Outputs are touched once more, after the last task.
            self.relations.users.row(b).len() as u32 + u32::from(buffer.live_out)
        });
        let mut state = State {
            waiting: (0..tasks).map(degree).collect(),
            begun: vec![false; tasks as usize],
            users: users.collect(),
            alive: self.dag.buffers.iter().map(|b| b.live_in).collect(),
            in_flight: VecDeque::new(),
            totals: Totals::default(),
            changes: Vec::new(),
        };
        let inputs = self.dag.buffers.iter().filter(|b| b.live_in);
        state.totals.live = inputs.map(|b| b.occupied_on_device()).sum();
        state
    }

    /// The task to begin next; `None` if a collective is to be waited for before that.
    fn next(&self, state: &mut State) -> Option<u32> {
        let first = state.totals.first;
        let window = &self.order[first..(first + AHEAD).min(self.order.len())];
        let is_collective = |task: &TaskId| self.is_collective[task.index()];
        let mut ready = window
            .iter()
            .copied()
            .filter(|t| !state.begun[t.index()] && state.waiting[t.index()] == 0);
        let task = ready.next();
        let early = task.into_iter().chain(ready).find(is_collective);
        let is_free = state.in_flight.len() < IN_FLIGHT_MAX;
        if let Some(early) = early.filter(|_| is_free)
            && self.fits(state, early.0)
        {
            return Some(early.0);
        }
        let task = task?;
        // Without collectives in flight, it is the next one of the plan.
        let may = state.in_flight.is_empty()
            || ((is_free || !is_collective(&task)) && self.fits(state, task.0));
        may.then_some(task.0)
    }

    /// Whether a task can begin, and all deferred ones be caught up with behind it, within the
    /// target. Leaves the state as it is.
    fn fits(&self, state: &mut State, task: u32) -> bool {
        let (totals, in_flight) = (state.totals, state.in_flight.clone());
        state.changes.clear();
        state.totals.peak = 0;
        let fits = self.catches_up(state, task);
        state.undo();
        (state.totals, state.in_flight) = (totals, in_flight);
        fits
    }

    /// Begins a task and catches up with all deferred ones, until that exceeds the target.
    fn catches_up(&self, state: &mut State, task: u32) -> bool {
        self.apply(state, task);
        let Totals { first, end, .. } = state.totals;
        for &task in &self.order[first..end] {
            while !state.begun[task.index()] && state.totals.peak <= self.target {
                if state.waiting[task.index()] == 0 {
                    self.apply(state, task.0);
                } else if !self.finish(state) {
                    // It waits for a task that comes later in the order, which cannot be.
                    return false;
                }
            }
        }
        while state.totals.peak <= self.target && self.finish(state) {}
        state.totals.peak <= self.target
    }

    /// Runs a task, or starts a collective.
    fn apply(&self, state: &mut State, task: u32) {
        let own = &self.dag.tasks[task as usize];
        state.change(Change::Begun(task));
        let mut live = state.totals.live;
        for &b in self.relations.uses.row(task as usize) {
            if state.alive[b as usize] {
                continue;
            }
            state.change(Change::Alive(b));
            let bytes = self.dag.buffers[b as usize].occupied_on_device();
            state.totals.live += bytes;
            // A buffer in place needs no bytes of its own while both are touched.
            let in_place = self.taken[b as usize].is_some_and(|(by, from)| {
                by.0 == task && state.users[from as usize] == 1 && state.alive[from as usize]
            });
            live += if in_place { 0 } else { bytes };
        }
        state.totals.peak = state.totals.peak.max(live + own.workspace_occupied());
        if self.is_collective[task as usize] {
            state.in_flight.push_back(task);
        } else {
            self.end(state, task);
        }
        let position = |at: usize| self.order.get(at).map(|task| task.index());
        // The tasks at and beyond `end` have not begun, except for this one.
        let ahead = &self.order[state.totals.end..];
        if let Some(at) = ahead.iter().take(AHEAD).position(|t| t.0 == task) {
            state.totals.end += at + 1;
        }
        while position(state.totals.first).is_some_and(|task| state.begun[task]) {
            state.totals.first += 1;
        }
    }

    /// Ends the oldest collective; `false` if there is none.
    fn finish(&self, state: &mut State) -> bool {
        let Some(task) = state.in_flight.pop_front() else {
            return false;
        };
        state.totals.peak = state.totals.peak.max(state.totals.live);
        self.end(state, task);
        true
    }

    /// Lets the dependents of a task go on, and ends the buffers that it was the last to touch.
    fn end(&self, state: &mut State, task: u32) {
        for &next in self.relations.after.row(task as usize) {
            state.change(Change::Waiting(next));
        }
        for &b in self.relations.uses.row(task as usize) {
            state.change(Change::Users(b));
            if state.users[b as usize] == 0 {
                state.change(Change::Alive(b));
                state.totals.live -= self.dag.buffers[b as usize].occupied_on_device();
            }
        }
    }
}
