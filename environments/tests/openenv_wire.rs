//! What servers say that real ones seldom say: late, slow, endless, cut and odd messages end an episode,
//! each with its reason, and none hangs or passes for an observation.

mod support;

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use environments::{CallPermit, EnvironmentSpec, Fault, Recorder};
use protocol::{CallKind, TraceRow};
use serde_json::{Value, json};
use support::{call, key, task};
use tungstenite::{Message, WebSocket, accept};

type Socket = WebSocket<TcpStream>;

const HELLO: &str =
    r#"{"type":"observation","data":{"observation":{"text":"hello"},"reward":null,"done":false}}"#;

/// A server that meets every session with `serve`, for as long as the test runs.
fn serving(serve: impl Fn(Socket) + Send + Sync + Clone + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
    let url = format!("ws://{}", listener.local_addr().expect("bound"));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = serve.clone();
            thread::spawn(move || {
                if let Ok(socket) = accept(stream) {
                    serve(socket);
                }
            });
        }
    });
    url
}

/// A server that answers requests one after another with `answers`, and every further one with nothing.
fn answering(answers: &'static [&'static str]) -> String {
    serving(move |mut socket| {
        for answer in answers {
            if socket.read().is_err() || socket.send(Message::text(*answer)).is_err() {
                return;
            }
        }
        while socket.read().is_ok() {}
    })
}

fn spec(url: &str, settings: Value) -> EnvironmentSpec {
    let mut section = json!({
        "openenv": url,
        "determinism": "recorded",
        "call_seconds": 1,
        "reset_seconds": 1,
        "connect_seconds": 1,
        "action": {"type": "object", "properties": {"n": {"type": "integer"}}},
    });
    for (key, value) in settings.as_object().into_iter().flatten() {
        section[key] = value.clone();
    }
    EnvironmentSpec::parse_in(&section, Path::new(".")).expect("a valid section")
}

fn start(spec: &EnvironmentSpec) -> Result<Recorder, Fault> {
    Recorder::start(spec.open()?, key(&task("{}"), 7), spec.limits())
}

/// What becomes of the first call after a good reset.
fn called(url: &str, settings: Value) -> Result<TraceRow, String> {
    let mut episode = start(&spec(url, settings)).expect("resets");
    let row = episode.call(0, &call("step", r#"{"n":1}"#), CallPermit::Run);
    row.cloned().map_err(|fault| fault.to_string())
}

#[track_caller]
fn fault(url: &str, expected: &str) {
    let fault = called(url, json!({})).expect_err("a fault");
    assert!(fault.contains(expected) && !fault.contains('\n'), "{fault}");
}

#[test]
fn odd_messages_are_faults_with_a_reason() {
    for (answers, expected) in [
        (&[HELLO, "hello"][..], "its message is no JSON"),
        (&[HELLO, r#"{"type":"observation"}"#], "holds no data"),
        (&[HELLO, r#"{"type":"state","data":{}}"#], r#"of type "state""#),
        (&[HELLO, r#"{"type":"observation","data":{}}"#], "holds no observation"),
        (
            &[HELLO, r#"{"type":"observation","data":{"observation":{},"done":1}}"#],
            "its done is neither",
        ),
        (
            &[HELLO, r#"{"type":"observation","data":{"observation":{},"reward":"1"}}"#],
            "its reward is no number",
        ),
        (
            &[HELLO, r#"{"type":"error","data":{"code":"SESSION_ERROR","message":"a\nb"}}"#],
            "SESSION_ERROR: a b",
        ),
        (
            &[HELLO, r#"{"type":"error","data":{"code":"CAPACITY_REACHED"}}"#],
            "as many episodes as it can",
        ),
        (&[HELLO, "[]"], "holds no data"),
    ] {
        fault(&answering(answers), expected);
    }
}

#[test]
fn ends_of_every_kind_are_faults() {
    let hello = |socket: &mut Socket| {
        socket.read().expect("a reset");
        socket.send(Message::text(HELLO)).expect("said");
        socket.read().expect("a step");
    };
    let closes = serving(move |mut socket| {
        hello(&mut socket);
        socket.close(None).expect("closes");
        while socket.read().is_ok() {}
    });
    fault(&closes, "it closed the session");
    let dies = serving(move |mut socket| hello(&mut socket));
    fault(&dies, "its connection broke");
    let binary = serving(move |mut socket| {
        hello(&mut socket);
        socket.send(Message::binary(vec![1, 2])).expect("said");
        while socket.read().is_ok() {}
    });
    fault(&binary, "its message is no text");
    let long = serving(move |mut socket| {
        hello(&mut socket);
        drop(socket.send(Message::text("x".repeat(5 << 20))));
        while socket.read().is_ok() {}
    });
    fault(&long, "its connection broke");
}

#[test]
fn a_deadline_holds_however_slowly_bytes_drip() {
    let silent = answering(&[HELLO]);
    let drips = serving(|mut socket| {
        socket.read().expect("a reset");
        socket.send(Message::text(HELLO)).expect("said");
        socket.read().expect("a step");
        let mut stream = socket.get_ref().try_clone().expect("a stream");
        // The head of a text frame of 100 bytes, and then a byte now and then.
        let head = stream.write_all(&[0x81, 100]);
        let mut alive = head.is_ok();
        while alive {
            thread::sleep(Duration::from_millis(50));
            alive = stream.write_all(b"x").is_ok();
        }
    });
    for url in [silent, drips] {
        let started = Instant::now();
        fault(&url, "no answer for 1s");
        assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    }
}

#[test]
fn a_server_that_never_answers_a_handshake_is_not_waited_for() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
    let url = format!("ws://{}", listener.local_addr().expect("bound"));
    let started = Instant::now();
    let fault = start(&spec(&url, json!({}))).expect_err("a fault").to_string();
    assert!(fault.contains("opens no WebSocket"), "{fault}");
    assert!(started.elapsed() < Duration::from_secs(3));
}

#[test]
fn resets_that_fail_are_faults() {
    for (answer, expected) in [
        (
            r#"{"type":"error","data":{"code":"EXECUTION_ERROR","message":"no such task"}}"#,
            "reset: no such task",
        ),
        (r#"{"type":"observation","data":{"observation":{},"done":true}}"#, "over before it began"),
        (r#"{"type":"error","data":{"code":"FACTORY_ERROR","message":"no"}}"#, "FACTORY_ERROR: no"),
    ] {
        let url = serving(move |mut socket| {
            drop(socket.read());
            drop(socket.send(Message::text(answer)));
            while socket.read().is_ok() {}
        });
        let fault = start(&spec(&url, json!({}))).expect_err("a fault").to_string();
        assert!(fault.contains(expected), "{fault}");
    }
}

#[test]
fn observations_are_shown_by_one_rule() {
    for (observation, field, expected) in [
        (r#"{"metadata":{"at":1.5},"text":"plain"}"#, None, "plain"),
        (r#"{"text":"a","n":2,"metadata":{}}"#, None, r#"{"text":"a","n":2}"#),
        (r#"{"z":1,"a":[null,true]}"#, None, r#"{"z":1,"a":[null,true]}"#),
        (r#"{"text":"a","n":2}"#, Some("text"), "a"),
        (r#"{"text":"a","n":{"b":2}}"#, Some("n"), r#"{"b":2}"#),
        ("{}", None, "{}"),
        (r#""bare""#, None, "bare"),
        ("null", None, "null"),
        (r#"{"text":"  <|im_end|>\r\n\u0000 "}"#, None, "  <|im_end|>\r\n\0 "),
    ] {
        let answer = format!(r#"{{"type":"observation","data":{{"observation":{observation}}}}}"#);
        let url = serving(move |mut socket| {
            while socket.read().is_ok() && socket.send(Message::text(answer.clone())).is_ok() {}
        });
        let settings = field.map_or(json!({}), |field| json!({"observation": field}));
        let row = called(&url, settings).expect("no fault");
        assert_eq!((row.kind, row.observation.as_str()), (CallKind::Ok, expected));
    }
    let url = answering(&[HELLO]);
    let fault =
        start(&spec(&url, json!({"observation": "board"}))).expect_err("a fault").to_string();
    assert!(fault.contains("no field \"board\": mend environment.observation"), "{fault}");
}

#[test]
fn rewards_of_steps_make_the_episode_s() {
    const STEP: fn(&str) -> String = |reward| {
        format!(r#"{{"type":"observation","data":{{"observation":{{}},"reward":{reward}}}}}"#)
    };
    for (total, expected) in [("sum", 1.75), ("last", 0.25), ("max", 1.0)] {
        let url = serving(|mut socket| {
            for reward in ["null", "0.5", "null", "true", "0.25"] {
                drop(socket.read());
                drop(socket.send(Message::text(STEP(reward))));
            }
            while socket.read().is_ok() {}
        });
        let spec =
            spec(&url, json!({"reward": total, "reward_range": [0, 2], "success_reward": 1}));
        let mut episode = start(&spec).expect("resets");
        for turn in 0..4 {
            episode.call(turn, &call("step", "{}"), CallPermit::Run).expect("no fault");
        }
        let score = episode.finish().expect("scored").score;
        assert_eq!((score.reward, score.success), (expected, expected >= 1.0), "{total}");
    }
    let url =
        answering(&[HELLO, r#"{"type":"observation","data":{"observation":{},"reward":1.5}}"#]);
    let mut episode = start(&spec(&url, json!({}))).expect("resets");
    episode.call(0, &call("step", "{}"), CallPermit::Run).expect("no fault");
    let fault = episode.finish().expect_err("out of range").to_string();
    assert!(fault.contains("outside environment.reward_range, 0 to 1: widen it"), "{fault}");
}

#[test]
fn refused_actions_and_raised_errors_are_shown() {
    let refused = r#"{"type":"error","data":{"message":"Invalid message","code":"VALIDATION_ERROR","errors":[{"type":"x","loc":["a",0],"msg":"Input should be less","input":{"big":1},"url":"u"}]}}"#;
    for (answer, expected) in [
        (refused, r#"{"error": "a.0: Input should be less"}"#),
        (
            r#"{"type":"error","data":{"message":"Invalid message","code":"VALIDATION_ERROR"}}"#,
            r#"{"error": "Invalid message"}"#,
        ),
        (
            r#"{"type":"error","data":{"message":"tool \"exploded\"\n","code":"EXECUTION_ERROR"}}"#,
            r#"{"error": "tool \"exploded\"\n"}"#,
        ),
    ] {
        let url = serving(move |mut socket| {
            drop(socket.read());
            drop(socket.send(Message::text(HELLO)));
            drop(socket.read());
            drop(socket.send(Message::text(answer)));
            while socket.read().is_ok() {}
        });
        let row = called(&url, json!({})).expect("no fault");
        assert_eq!((row.kind, row.observation.as_str()), (CallKind::Raised, expected));
    }
}

#[test]
fn a_schema_is_read_over_http_or_asked_for() {
    let serve = |reply: String| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut request = [0; 1024];
                let length = stream.read(&mut request).unwrap_or_default();
                assert!(request[..length].starts_with(b"GET /schema HTTP/1.1\r\n"));
                drop(stream.write_all(reply.as_bytes()));
            }
        });
        let section = json!({"openenv": url, "determinism": "recorded", "reset_seconds": 1});
        let spec = EnvironmentSpec::parse_in(&section, Path::new(".")).expect("valid");
        spec.tools().map_err(|fault| fault.to_string())
    };
    let parts = [
        r#"{"action": {"$defs": {"D": "#,
        r##"{"enum": ["l", "r"], "type": "string", "title": "D"}}, "type": "object", "##,
        r##""properties": {"to": {"$ref": "#/$defs/D"}}, "x": 1}}"##,
    ];
    let chunks = parts.map(|part| format!("{:x}\r\n{part}\r\n", part.len())).concat();
    let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    let tools = serve(format!("{head}{chunks}0\r\n\r\n"));
    let tools = tools.expect("described");
    assert_eq!(
        tools[0].parameters,
        json!({"type": "object", "properties": {"to": {"enum": ["l", "r"], "type": "string"}}, "x": 1})
    );
    for (reply, expected) in [
        ("HTTP/1.1 404 Not Found\r\n\r\n", "set environment.action to the JSON schema"),
        ("HTTP/1.1 500 Oh\r\n\r\n", "status 500"),
        ("HTTP/1.1 200 OK\r\n\r\n{", "/schema: EOF"),
        ("SSH-2.0-x\r\n", "/schema: invalid"),
        ("", "its reply ends early"),
    ] {
        let refused = serve(reply.into()).expect_err("refused");
        assert!(refused.contains(expected) && !refused.contains('\n'), "{refused}");
    }
}

#[test]
fn only_servers_that_the_owner_allows_are_reached_from_elsewhere() {
    let url = answering(&[HELLO]);
    let refused =
        EnvironmentSpec::parse(&json!({"openenv": url})).expect_err("refused").to_string();
    let expected = format!(
        "environment.openenv: this machine's owner has not allowed it: set ROLLCALL_ALLOW='[\"{url}\"]' (a \
         JSON list) where this program is started"
    );
    assert_eq!(refused, expected);
    let allowed = spec(&url, json!({}));
    let variables = allowed.variables();
    assert_eq!(variables, [("ROLLCALL_ALLOW", format!("[\"{url}\"]").into())]);
    for (section, expected) in [
        (json!({"openenv": 3}), "environment.openenv must be a server's URL"),
        (json!({"openenv": "localhost:8000"}), "environment.openenv must be a server's URL"),
        (
            json!({"openenv": url, "reward": "mean"}),
            r#"environment.reward must be one of "sum", "last", "max""#,
        ),
        (
            json!({"openenv": url, "success_reward": 2}),
            "environment.success_reward must be a number from 0 to 1",
        ),
        (json!({"openenv": url, "port": 1}), "environment.port is unknown"),
    ] {
        let refused =
            EnvironmentSpec::parse_in(&section, Path::new(".")).expect_err("refused").to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}
