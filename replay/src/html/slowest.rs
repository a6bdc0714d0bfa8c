//! The slowest requests: where their time went.

use std::fmt::Write;

use crate::human::{milliseconds, seconds, whole};
use crate::report::{Phase, SlowRequest};

/// What a phase is called, and its colour.
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

pub(super) fn section(slowest: &[SlowRequest]) -> String {
    let mut html = String::from(
        "<section><h2>The slowest first tokens</h2><p class=\"quiet\">Each bar is a request from its \
         arrival to its last token, all on one scale; the dark mark is the first token.</p>\
         <ul class=\"legend\">",
    );
    for (name, colour) in PHASES.map(shown) {
        let _ = write!(
            html,
            "<li><span class=\"key\" style=\"--c:var(--{colour})\"></span>{name}</li>"
        );
    }
    html.push_str("</ul><div class=\"slow\">");
    let longest = slowest.iter().map(|request| request.e2e_ms).fold(1e-9, f64::max);
    for request in slowest {
        row(&mut html, request, longest);
    }
    html.push_str("</div></section>\n");
    html
}

fn row(html: &mut String, request: &SlowRequest, longest_ms: f64) {
    let at = |ms: f64| (ms / longest_ms * 100.0).clamp(0.0, 100.0);
    let reused = request.device_hit_tokens + request.host_hit_tokens + request.l3_hit_tokens;
    let _ = write!(
        html,
        "<div><div class=\"what\"><b>{}</b><span>request {} at {}, worker {}</span>\
         <span>{} tokens in, {} out</span><span class=\"quiet\">{} reused: device {}, host {}, L3 {}; \
         could be {}</span></div><div class=\"bar\">",
        milliseconds(request.ttft_ms),
        whole(request.request),
        seconds(request.arrival_s),
        request.worker,
        whole(request.input_tokens.into()),
        whole(request.output_tokens.into()),
        whole(reused.into()),
        whole(request.device_hit_tokens.into()),
        whole(request.host_hit_tokens.into()),
        whole(request.l3_hit_tokens.into()),
        whole(request.ceiling_tokens.into()),
    );
    for span in &request.spans {
        let (name, colour) = shown(span.phase);
        let _ = write!(
            html,
            "<span style=\"--c:var(--{colour});left:{:.2}%;width:{:.2}%\" title=\"{name}: {}\"></span>",
            at(span.from_ms),
            at(span.to_ms) - at(span.from_ms),
            milliseconds(span.to_ms - span.from_ms)
        );
    }
    let _ = write!(html, "<i style=\"left:{:.2}%\"></i></div></div>", at(request.ttft_ms));
}
