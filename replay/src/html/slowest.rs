//! The slowest requests, with the time of each phase.

use maud::{Markup, html};

use crate::human::{milliseconds, seconds, whole};
use crate::report::{Phase, SlowRequest};

/// Returns the name of a phase and its colour.
fn shown(phase: Phase) -> (&'static str, &'static str) {
    match phase {
        Phase::Waiting => ("waiting", "waiting"),
        Phase::Fetching => ("fetching from L3", "fetching"),
        Phase::Fetched => ("fetched, waiting for room", "l3"),
        Phase::Loading => ("loading from host", "loading"),
        Phase::Prefilling => ("prefilling", "prefilling"),
        Phase::Decoding => ("decoding", "decoding"),
        Phase::Retracted => ("retracted", "retracted"),
        Phase::Moving => ("going to another worker", "draining"),
    }
}

const PHASES: [Phase; 8] = [
    Phase::Waiting,
    Phase::Fetching,
    Phase::Fetched,
    Phase::Loading,
    Phase::Prefilling,
    Phase::Decoding,
    Phase::Retracted,
    Phase::Moving,
];

pub(super) fn section(slowest: &[SlowRequest]) -> Markup {
    let longest_ms = slowest.iter().map(|request| request.e2e_ms).fold(1e-9, f64::max);
    let content = html! {
        p.quiet {
            "Each bar is a request from its arrival to its last token, all on one scale; the dark mark is the first "
            "token."
        }
        ul.legend {
            @for (name, colour) in PHASES.map(shown) { (super::key(colour, name)) }
        }
        div.slow { @for request in slowest { (row(request, longest_ms)) } }
    };
    super::section("The slowest first tokens", &content)
}

fn row(request: &SlowRequest, longest_ms: f64) -> Markup {
    let at = |ms: f64| (ms / longest_ms * 100.0).clamp(0.0, 100.0);
    let hits = [request.device_hit_tokens, request.host_hit_tokens, request.l3_hit_tokens];
    let reused = whole(hits.iter().sum::<u32>().into());
    let [device, host, l3] = hits.map(|tokens| whole(tokens.into()));
    let [input, output, ceiling] =
        [request.input_tokens, request.output_tokens, request.ceiling_tokens]
            .map(|tokens| whole(tokens.into()));
    html! {
        div {
            div.what {
                b { (milliseconds(request.ttft_ms)) }
                span {
                    "request " (whole(request.request)) " at " (seconds(request.arrival_s)) ", worker "
                    (request.worker)
                }
                span { (input) " tokens in, " (output) " out" }
                span.quiet {
                    (reused) " reused: device " (device) ", host " (host) ", L3 " (l3) "; could be " (ceiling)
                }
            }
            div.bar {
                @for span in &request.spans {
                    @let (name, colour) = shown(span.phase);
                    @let (from, to) = (at(span.from_ms), at(span.to_ms));
                    span style=(format!("--c:var(--{colour});left:{from:.2}%;width:{:.2}%", to - from))
                        title={ (name) ": " (milliseconds(span.to_ms - span.from_ms)) } {}
                }
                i style=(format!("left:{:.2}%", at(request.ttft_ms))) {}
            }
        }
    }
}
