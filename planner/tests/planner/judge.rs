//! The peak and cost of a schedule of a graph, by the rules of the format, one step after the
//! other.

use slabwise_planner::remat_graph::{Place, RematGraph, Step};

/// The results of a valid schedule, above the persistent nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Judged {
    pub peak: u64,
    pub cost: u64,
    /// With one stream for computation, and one engine for each direction of copies.
    pub time: f64,
    /// The end of the slab, if steps have offsets.
    pub height: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Copying {
    No,
    Out(f64),
    In(f64),
}

struct Judge<'g> {
    graph: &'g RematGraph,
    /// Node → the offset of its buffer, while it is live.
    live: Vec<Option<u64>>,
    copying: Vec<Copying>,
    on_host: Vec<bool>,
    runs: Vec<u32>,
    changed_by: Vec<Option<u32>>,
    bytes: u64,
    engines: [f64; 2],
    link: f64,
    judged: Judged,
}

/// Judges a schedule in which copying a byte takes `link`, or returns why it is invalid. Offsets
/// count if steps have them.
pub fn judge(
    graph: &RematGraph,
    steps: impl IntoIterator<Item = (Step, Option<Place>)>,
    link: f64,
) -> Result<Judged, String> {
    let n = graph.nodes.len();
    let mut judge = Judge {
        graph,
        live: vec![None; n],
        copying: vec![Copying::No; n],
        on_host: vec![false; n],
        runs: vec![0; n],
        changed_by: vec![None; n],
        bytes: 0,
        engines: [0.0; 2],
        link,
        judged: Judged::default(),
    };
    for (step, place) in steps {
        judge
            .step(step, place)
            .map_err(|why| format!("{step:?}: {why}"))?;
    }
    for (i, node) in graph.nodes.iter().enumerate() {
        let missing = graph.outputs.contains(&(i as u32)) && !node.persistent && !judge.is_live(i);
        if missing || (!node.mutates.is_empty() && judge.runs[i] == 0) {
            return Err(format!("{i} is missing at the end"));
        }
    }
    Ok(judge.judged)
}

impl Judge<'_> {
    fn is_live(&self, i: usize) -> bool {
        self.live[i].is_some() && !matches!(self.copying[i], Copying::In(_))
    }

    fn step(&mut self, step: Step, place: Option<Place>) -> Result<(), String> {
        let i = step.node() as usize;
        let duration = self.graph.nodes[i].bytes as f64 * self.link;
        let time = self.judged.time;
        match (step, self.copying[i]) {
            (Step::Compute { reuse, .. }, _) => return self.compute(i, reuse, place),
            (Step::Free(_), Copying::No) if self.live[i].is_some() => self.release(i),
            (Step::Offload(_), Copying::No) if self.live[i].is_some() => {
                self.engines[0] = time.max(self.engines[0]) + duration;
                self.copying[i] = Copying::Out(self.engines[0]);
            }
            (Step::Offloaded(_), Copying::Out(end)) => {
                self.judged.time = time.max(end);
                self.copying[i] = Copying::No;
                self.on_host[i] = true;
                self.release(i);
            }
            (Step::Prefetch(_), Copying::No) if self.on_host[i] && self.live[i].is_none() => {
                self.take(i, place)?;
                self.judged.peak = self.judged.peak.max(self.bytes);
                self.engines[1] = time.max(self.engines[1]) + duration;
                self.copying[i] = Copying::In(self.engines[1]);
            }
            (Step::Prefetched(_), Copying::In(end)) => {
                self.judged.time = time.max(end);
                self.copying[i] = Copying::No;
            }
            _ => return Err("not possible now".into()),
        }
        Ok(())
    }

    fn compute(
        &mut self,
        i: usize,
        reuse: Option<u32>,
        place: Option<Place>,
    ) -> Result<(), String> {
        let graph = self.graph;
        let node = &graph.nodes[i];
        if node.persistent || self.live[i].is_some() {
            return Err("it is there already".into());
        }
        if self.runs[i] > 0 && (!node.mutates.is_empty() || !node.recompute) {
            return Err("it runs again".into());
        }
        for &j in &node.inputs {
            if !graph.nodes[j as usize].persistent && !self.is_live(j as usize) {
                return Err(format!("it reads {j}, which is not there"));
            }
            if self.changed_by[j as usize].is_some_and(|by| by as usize != i) {
                return Err(format!("it reads {j}, which has been changed"));
            }
        }
        let need = self.bytes + node.workspace + if reuse.is_some() { 0 } else { node.bytes };
        self.judged.peak = self.judged.peak.max(need);
        if let Some(j) = reuse {
            let given = &graph.nodes[j as usize];
            let is_idle =
                self.live[j as usize].is_some() && self.copying[j as usize] == Copying::No;
            if !is_idle
                || !node.inplace.contains(&j)
                || given.bytes != node.bytes
                || graph.outputs.contains(&j)
            {
                return Err(format!("it may not take over {j}"));
            }
            self.release(j as usize);
        }
        self.take(i, place)?;
        if let Some(place) = place.filter(|_| node.workspace > 0) {
            self.is_free(place.workspace, node.workspace)?;
            self.judged.height = self.judged.height.max(place.workspace + node.workspace);
        }
        self.on_host[i] = false;
        self.runs[i] += 1;
        self.judged.cost += node.cost;
        self.judged.time += node.cost as f64;
        node.mutates
            .iter()
            .for_each(|&p| self.changed_by[p as usize] = Some(i as u32));
        Ok(())
    }

    fn take(&mut self, i: usize, place: Option<Place>) -> Result<(), String> {
        let bytes = self.graph.nodes[i].bytes;
        if let Some(place) = place {
            self.is_free(place.offset, bytes)?;
            self.judged.height = self.judged.height.max(place.offset + bytes);
        }
        // Without places, offsets are not checked.
        self.live[i] = Some(place.map_or(u64::MAX, |place| place.offset));
        self.bytes += bytes;
        Ok(())
    }

    fn is_free(&self, offset: u64, bytes: u64) -> Result<(), String> {
        let meets = |(j, at): (usize, &Option<u64>)| {
            let other = self.graph.nodes[j].bytes;
            at.is_some_and(|at| {
                at != u64::MAX
                    && other > 0
                    && bytes > 0
                    && at < offset + bytes
                    && offset < at + other
            })
        };
        match self.live.iter().enumerate().find(|&(j, at)| meets((j, at))) {
            Some((j, _)) => Err(format!("{bytes} bytes at {offset} are where {j} is")),
            None => Ok(()),
        }
    }

    fn release(&mut self, i: usize) {
        self.live[i] = None;
        self.bytes -= self.graph.nodes[i].bytes;
    }
}
