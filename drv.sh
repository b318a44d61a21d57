# t W H SESSION 'cmd' [maxwait]: types a command in a tmux of W x H and captures
T() { W=$1; H=$2; cmd=$3; mw=${4:-60}; s=w2_${W}; 
 tmux -L walk2 has-session -t $s 2>/dev/null || { tmux -L walk2 new-session -d -s $s -x $W -y $H "bash --rcfile /work/wt/walk2/env.sh -i"; sleep 0.5; tmux -L walk2 send-keys -t $s 'cd /work/wt/walk2/out' Enter; sleep 0.3; }
 tmux -L walk2 send-keys -t $s "clear; tmux -L walk2 clear-history" Enter; sleep 0.3
 rm -f /work/wt/walk2/done_$s
 tmux -L walk2 send-keys -l -t $s "$cmd; echo rc=\$?; touch /work/wt/walk2/done_$s"; tmux -L walk2 send-keys -t $s Enter
 for ((i=0;i<mw*5;i++)); do [ -e /work/wt/walk2/done_$s ] && break; sleep 0.2; done; sleep 0.2
 echo "##### [$W] $cmd"; tmux -L walk2 capture-pane -p -S -300 -t $s | sed -e 's/ *$//' | sed '/^$/d' | tail -n +${SKIP:-2}; }
